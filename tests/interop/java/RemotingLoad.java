import java.nio.charset.StandardCharsets;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * RocketMQ's Java client as an application has it: a producer, and a push consumer each of a plain
 * and of an ordered topic, with default settings. Each event is a line. A line that comes in ends
 * the sending, the end of standard input all.
 *
 * Arguments: NameServers, what the names of topics and groups begin with, milliseconds between sends.
 */
public final class RemotingLoad {
    private static volatile boolean isSending = true;

    private RemotingLoad() {}

    public static void main(String[] args) throws Exception {
        Lines.keepOutput();
        consume(args[0], args[1] + "-plain");
        consume(args[0], args[1] + "-ordered");
        DefaultMQProducer producer = new DefaultMQProducer(args[1] + "-producer");
        producer.setNamesrvAddr(args[0]);
        producer.start();
        for (String topic : List.of("plain", "ordered")) {
            Thread thread = new Thread(
                () -> send(producer, args[1] + "-" + topic, topic, Long.parseLong(args[2])));
            thread.setDaemon(true);
            thread.start();
        }
        Lines.next();
        isSending = false;
        Lines.waitForEnd();
        System.exit(0);
    }

    private static void put(String kind, String key, String reason) {
        long now = System.nanoTime() / 1_000_000;
        Lines.put(Lines.line("kind", kind, "key", key, "at_ms", now, "reason", reason));
    }

    private static void send(DefaultMQProducer producer, String topic, String stream, long periodMs) {
        for (long number = 0; isSending; number++) {
            String key = stream + "-" + number;
            Message message = new Message(topic, key.getBytes(StandardCharsets.UTF_8));
            try {
                SendResult result = stream.equals("plain")
                    ? producer.send(message)
                    : producer.send(message, new SelectMessageQueueByHash(), "one");
                boolean isStored = result.getSendStatus() == SendStatus.SEND_OK;
                put(isStored ? "sent" : "failed", key, isStored ? "" : result.getSendStatus().name());
            } catch (Exception error) {
                put("failed", key, error.toString());
            }
            try {
                Thread.sleep(periodMs);
            } catch (InterruptedException stopped) {
                return;
            }
        }
    }

    private static void consume(String nameServers, String topic) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(topic);
        consumer.setNamesrvAddr(nameServers);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        if (topic.endsWith("-ordered")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                messages.forEach(RemotingLoad::report);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(RemotingLoad::report);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        consumer.start();
    }

    private static void report(MessageExt message) {
        put("consumed", new String(message.getBody(), StandardCharsets.UTF_8), "");
    }
}
