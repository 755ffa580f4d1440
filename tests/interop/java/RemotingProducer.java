import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * RocketMQ's Java producer: a request a line comes in, an answer a line goes out.
 *
 * Arguments: NameServers.
 */
public final class RemotingProducer {
    private static final int SENDERS = 16;
    private static final int PAUSE_MS = 50;
    private static final int ROUTE_MS = 1_000;
    private static final int ANSWER_S = 30;

    private final TransactionMQProducer producer = new TransactionMQProducer("senders");

    private RemotingProducer(String nameServers) throws Exception {
        producer.setNamesrvAddr(nameServers);
        producer.setPollNameServerInterval(ROUTE_MS);
        producer.setTransactionListener(new Decisions());
        producer.start();
    }

    public static void main(String[] args) throws Exception {
        Lines.keepOutput();
        RemotingProducer producer = new RemotingProducer(args[0]);
        Lines.put(Lines.line("ready", true));
        for (Map<?, ?> asked = Lines.next(); asked != null; asked = Lines.next()) {
            if (asked.containsKey("many")) {
                producer.sendMany((String) asked.get("topic"), (Integer) asked.get("many"));
                continue;
            }
            try {
                Lines.put(producer.sent(asked));
            } catch (Exception error) {
                Lines.put(Lines.line("error", error.toString()));
            }
        }
        producer.producer.shutdown();
        System.exit(0);
    }

    /** Decides as the message is told to, and commits what is asked about. */
    private static final class Decisions implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object wanted) {
            if ("commit".equals(wanted)) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }
            return "rollback".equals(wanted)
                ? LocalTransactionState.ROLLBACK_MESSAGE
                : LocalTransactionState.UNKNOW;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            Lines.put(Lines.line(
                "checked", text(message.getBody()),
                "message_id", message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX)));
            return LocalTransactionState.COMMIT_MESSAGE;
        }
    }

    private static String text(byte[] body) {
        return new String(body, StandardCharsets.UTF_8);
    }

    private static Message made(Map<?, ?> asked, String topic) {
        byte[] body = ((String) asked.get("body")).getBytes(StandardCharsets.UTF_8);
        Message message = new Message(topic, body);
        if (asked.get("tags") != null) {
            message.setTags((String) asked.get("tags"));
        }
        if (asked.get("keys") != null) {
            message.setKeys((String) asked.get("keys"));
        }
        if (asked.get("delay_level") != null) {
            message.setDelayTimeLevel((Integer) asked.get("delay_level"));
        }
        if (asked.get("properties") != null) {
            ((Map<?, ?>) asked.get("properties")).forEach(
                (name, value) -> message.putUserProperty((String) name, (String) value));
        }
        return message;
    }

    private Map<String, Object> sent(Map<?, ?> asked) throws Exception {
        String topic = (String) asked.get("topic");
        String kind = asked.get("kind") == null ? "sync" : (String) asked.get("kind");
        if (kind.equals("batch")) {
            List<Message> batch = new ArrayList<>();
            for (Object item : (List<?>) asked.get("messages")) {
                batch.add(made((Map<?, ?>) item, topic));
            }
            return answer(producer.send(batch));
        }
        Message message = made(asked, topic);
        switch (kind) {
            case "async":
                return answer(sentAsynchronously(message));
            case "oneway":
                producer.sendOneway(message);
                return Lines.line("oneway", true);
            case "orderly":
                return answer(producer.send(message, new SelectMessageQueueByHash(), asked.get("shard")));
            case "transaction":
                return answer(producer.sendMessageInTransaction(message, asked.get("decision")));
            default:
                return answer(producer.send(message));
        }
    }

    private SendResult sentAsynchronously(Message message) throws Exception {
        CompletableFuture<SendResult> answered = new CompletableFuture<>();
        producer.send(message, new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                answered.complete(result);
            }

            @Override
            public void onException(Throwable error) {
                answered.completeExceptionally(error);
            }
        });
        return answered.get(ANSWER_S, TimeUnit.SECONDS);
    }

    private static Map<String, Object> answer(SendResult result) {
        return Lines.line(
            "status", result.getSendStatus().name(),
            "message_id", result.getMsgId(),
            "queue_id", result.getMessageQueue().getQueueId(),
            "offset", result.getQueueOffset());
    }

    /** Send until so many messages are acknowledged; each of them is a line. */
    private void sendMany(String topic, int wanted) throws Exception {
        AtomicInteger acknowledged = new AtomicInteger();
        AtomicInteger number = new AtomicInteger();
        List<Thread> senders = new ArrayList<>();
        for (int sender = 0; sender < SENDERS; sender++) {
            Thread thread = new Thread(() -> {
                while (acknowledged.get() < wanted) {
                    String body = String.format("m%06d", number.getAndIncrement());
                    if (sendOne(topic, body)) {
                        acknowledged.incrementAndGet();
                    }
                }
            });
            thread.start();
            senders.add(thread);
        }
        for (Thread sender : senders) {
            sender.join();
        }
        Lines.put(Lines.line("done", wanted));
    }

    private boolean sendOne(String topic, String body) {
        try {
            Map<String, Object> answer = sent(
                Lines.line("topic", topic, "body", body, "tags", "F", "keys", body));
            answer.put("acknowledged", body);
            Lines.put(answer);
            return "SEND_OK".equals(answer.get("status"));
        } catch (Exception error) {
            Lines.put(Lines.line("failed", body, "error", error.toString()));
            try {
                Thread.sleep(PAUSE_MS);
            } catch (InterruptedException stopped) {
                Thread.currentThread().interrupt();
            }
            return false;
        }
    }
}
