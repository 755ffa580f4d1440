import java.nio.charset.StandardCharsets;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.spring.annotation.ConsumeMode;
import org.apache.rocketmq.spring.annotation.RocketMQMessageListener;
import org.apache.rocketmq.spring.core.RocketMQListener;
import org.apache.rocketmq.spring.core.RocketMQPushConsumerLifecycleListener;
import org.apache.rocketmq.spring.core.RocketMQTemplate;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;

/**
 * An application of Spring Boot with RocketMQ's starter, in its default settings: a template that
 * sends, and a listener each of a plain and of an ordered topic. Lines and arguments are those of
 * RemotingLoad.
 */
@Configuration
@EnableAutoConfiguration
public class SpringLoad {
    private static volatile boolean isSending = true;

    public static void main(String[] args) throws Exception {
        Lines.keepOutput();
        System.setProperty("rocketmq.name-server", args[0]);
        System.setProperty("rocketmq.producer.group", args[1] + "-producer");
        System.setProperty("load.prefix", args[1]);
        RocketMQTemplate template = SpringApplication.run(SpringLoad.class).getBean(RocketMQTemplate.class);
        for (String stream : List.of("plain", "ordered")) {
            Thread thread = new Thread(() -> send(template, args[1] + "-" + stream, stream, args[2]));
            thread.setDaemon(true);
            thread.start();
        }
        Lines.next();
        isSending = false;
        Lines.waitForEnd();
        System.exit(0);
    }

    @Bean
    Listener plain() {
        return new Plain();
    }

    @Bean
    Listener ordered() {
        return new Ordered();
    }

    private static void put(String kind, String key, String reason) {
        long now = System.nanoTime() / 1_000_000;
        Lines.put(Lines.line("kind", kind, "key", key, "at_ms", now, "reason", reason));
    }

    private static void send(RocketMQTemplate template, String topic, String stream, String periodMs) {
        for (long number = 0; isSending; number++) {
            String key = stream + "-" + number;
            try {
                SendResult result = stream.equals("plain")
                    ? template.syncSend(topic, key)
                    : template.syncSendOrderly(topic, key, "one");
                boolean isStored = result.getSendStatus() == SendStatus.SEND_OK;
                put(isStored ? "sent" : "failed", key, isStored ? "" : result.getSendStatus().name());
            } catch (Exception error) {
                put("failed", key, error.toString());
            }
            try {
                Thread.sleep(Long.parseLong(periodMs));
            } catch (InterruptedException stopped) {
                return;
            }
        }
    }

    abstract static class Listener
        implements RocketMQListener<MessageExt>, RocketMQPushConsumerLifecycleListener {

        @Override
        public void prepareStart(DefaultMQPushConsumer consumer) {
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        }

        @Override
        public void onMessage(MessageExt message) {
            put("consumed", new String(message.getBody(), StandardCharsets.UTF_8), "");
        }
    }

    @RocketMQMessageListener(topic = "${load.prefix}-plain", consumerGroup = "${load.prefix}-plain")
    static final class Plain extends Listener {}

    @RocketMQMessageListener(
        topic = "${load.prefix}-ordered",
        consumerGroup = "${load.prefix}-ordered",
        consumeMode = ConsumeMode.ORDERLY)
    static final class Ordered extends Listener {}
}
