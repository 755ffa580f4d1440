import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * RocketMQ's Java consumers until standard input ends: each message is a line.
 *
 * What begins with "again" is refused once, what begins with "never" always: it is a dead letter
 * after two more attempts.
 *
 * Arguments: NameServers, and a line of JSON for each consumer: "kind" (push, orderly, lite),
 * "group", "topic", and "tags" or "sql".
 */
public final class RemotingConsumers {
    private static final int ATTEMPTS_AFTER_THE_FIRST = 2;
    private static final int LEVEL_OF_A_SECOND = 1;
    private static final int SUSPEND_MS = 100;
    private static final int ROUTE_MS = 1_000;
    private static final int POLL_MS = 500;
    private static final int COMMIT_MS = 500;

    private RemotingConsumers() {}

    public static void main(String[] args) throws Exception {
        Lines.keepOutput();
        List<Runnable> stops = new ArrayList<>();
        for (int place = 1; place < args.length; place++) {
            Map<?, ?> asked = Lines.parsed(args[place]);
            stops.add("lite".equals(asked.get("kind")) ? polls(args[0], asked) : pushed(args[0], asked));
        }
        Lines.put(Lines.line("ready", true));
        Lines.waitForEnd();
        stops.forEach(Runnable::run);
        System.exit(0);
    }

    private static Runnable pushed(String nameServers, Map<?, ?> asked) throws Exception {
        String group = (String) asked.get("group");
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServers);
        consumer.setPollNameServerInterval(ROUTE_MS);
        consumer.setPersistConsumerOffsetInterval(COMMIT_MS);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setMaxReconsumeTimes(ATTEMPTS_AFTER_THE_FIRST);
        String topic = (String) asked.get("topic");
        if (asked.get("sql") != null) {
            consumer.subscribe(topic, MessageSelector.bySql((String) asked.get("sql")));
        } else {
            consumer.subscribe(topic, (String) asked.get("tags"));
        }
        if ("orderly".equals(asked.get("kind"))) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                context.setSuspendCurrentQueueTimeMillis(SUSPEND_MS);
                return isTaken(group, messages)
                    ? ConsumeOrderlyStatus.SUCCESS
                    : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                context.setDelayLevelWhenNextConsume(LEVEL_OF_A_SECOND);
                return isTaken(group, messages)
                    ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                    : ConsumeConcurrentlyStatus.RECONSUME_LATER;
            });
        }
        consumer.start();
        return consumer::shutdown;
    }

    /** Report messages, one at a time as both consumers are set by default. */
    private static boolean isTaken(String group, List<MessageExt> messages) {
        boolean taken = true;
        for (MessageExt message : messages) {
            String body = new String(message.getBody(), StandardCharsets.UTF_8);
            put(group, body, message);
            taken &= !body.startsWith("never")
                && !(body.startsWith("again") && message.getReconsumeTimes() == 0);
        }
        return taken;
    }

    private static void put(String group, String body, MessageExt message) {
        Lines.put(Lines.line(
            "consumer", group,
            "body", body,
            "topic", message.getTopic(),
            "tags", message.getTags(),
            "keys", message.getKeys(),
            "origin", message.getProperty("origin"),
            "message_id", message.getMsgId(),
            "queue_id", message.getQueueId(),
            "queue_offset", message.getQueueOffset(),
            "reconsume_times", message.getReconsumeTimes()));
    }

    private static Runnable polls(String nameServers, Map<?, ?> asked) throws Exception {
        String group = (String) asked.get("group");
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group);
        consumer.setNamesrvAddr(nameServers);
        consumer.setPollNameServerInterval(ROUTE_MS);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        consumer.subscribe((String) asked.get("topic"), (String) asked.get("tags"));
        consumer.start();
        AtomicBoolean stopped = new AtomicBoolean();
        Thread poller = new Thread(() -> {
            while (!stopped.get()) {
                for (MessageExt message : consumer.poll(POLL_MS)) {
                    put(group, new String(message.getBody(), StandardCharsets.UTF_8), message);
                }
                consumer.commitSync();
            }
        });
        poller.start();
        return () -> {
            stopped.set(true);
            try {
                poller.join();
            } catch (InterruptedException interrupted) {
                Thread.currentThread().interrupt();
            }
            consumer.shutdown();
        };
    }
}
