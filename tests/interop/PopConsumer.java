import java.nio.charset.StandardCharsets;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * RocketMQ's push consumer in POP mode: prints each body that it consumed, its attempts before, and
 * whether it came by POP. Bodies that end in 7 are refused once.
 *
 * Arguments: NameServers, address of the broker, topic, group, how many bodies to wait for.
 */
public final class PopConsumer {
    private static final int INVISIBLE_MS = 10_000;
    private static final long LAST_ACKS_MS = 3_000;

    private PopConsumer() {}

    public static void main(String[] args) throws Exception {
        String nameServers = args[0];
        String topic = args[2];
        String group = args[3];
        int wanted = Integer.parseInt(args[4]);
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(nameServers);
        admin.start();
        admin.setMessageRequestMode(args[1], topic, group, MessageRequestMode.POP, 0, 5_000);
        admin.shutdown();

        Set<String> refused = ConcurrentHashMap.newKeySet();
        Set<String> consumed = ConcurrentHashMap.newKeySet();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServers);
        consumer.setClientRebalance(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPopInvisibleTime(INVISIBLE_MS);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                String body = new String(message.getBody(), StandardCharsets.UTF_8);
                if (body.endsWith("7") && refused.add(body)) {
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
                boolean popped = message.getProperty("POP_CK") != null;
                System.out.println(body + " " + message.getReconsumeTimes() + " " + popped);
                consumed.add(body);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        while (consumed.size() < wanted) {
            Thread.sleep(100);
        }
        Thread.sleep(LAST_ACKS_MS);
        consumer.shutdown();
        System.exit(0);
    }
}
