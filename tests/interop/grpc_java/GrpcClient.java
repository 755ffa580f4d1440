import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.client.java.message.MessageViewImpl;

/**
 * Apache's Java client of the gRPC protocol, in one of four parts. A request a line comes in,
 * lines of JSON go out. Where a proxy dies the client also throws gRPC's own exceptions, which are
 * not checked.
 *
 * <p>Arguments: the part (as a load, endpoints, what the names of topics and groups begin with,
 * and milliseconds between sends; else one of the others), settings in JSON ({@code tls}, {@code namespace}, {@code access_key} and
 * {@code secret_key}), endpoints, and the part's own.
 */
public final class GrpcClient {
    private static final int SENDERS = 16;
    private static final Duration REQUEST_TIMEOUT = Duration.ofSeconds(5);
    private static final Duration AWAIT = Duration.ofSeconds(5);
    private static final Duration INVISIBLE = Duration.ofSeconds(20);
    private static final Duration SOON = Duration.ofSeconds(1);
    private static final int BATCH_SIZE = 32;
    private static final long PAUSE_MS = 200;

    private static final Gson JSON = new GsonBuilder().serializeNulls().create();
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final PrintStream OUTPUT =
            new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);

    private GrpcClient() {}

    private static JsonObject line(String name, Object value) {
        JsonObject line = new JsonObject();
        line.add(name, JSON.toJsonTree(value));
        return line;
    }

    private static synchronized void put(JsonObject line) {
        OUTPUT.println(JSON.toJson(line));
        OUTPUT.flush();
    }

    private static BufferedReader input() {
        return new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    }

    private static ClientConfiguration configuration(JsonObject settings, String endpoints) {
        ClientConfigurationBuilder configuration =
                ClientConfiguration.newBuilder()
                        .setEndpoints(endpoints)
                        .enableSsl(settings.has("tls"))
                        .setRequestTimeout(REQUEST_TIMEOUT);
        if (settings.has("namespace")) {
            configuration.setNamespace(text(settings, "namespace"));
        }
        if (settings.has("access_key")) {
            configuration.setCredentialProvider(
                    new StaticSessionCredentialsProvider(
                            text(settings, "access_key"), text(settings, "secret_key")));
        }
        return configuration.build();
    }

    // -------------------------------------------------------------------------- producer

    private static String text(JsonObject asked, String name) {
        return asked.has(name) ? asked.get(name).getAsString() : null;
    }

    private static JsonObject sent(Producer producer, JsonObject asked) throws ClientException {
        MessageBuilder message =
                PROVIDER.newMessageBuilder()
                        .setTopic(text(asked, "topic"))
                        .setBody(text(asked, "body").getBytes(StandardCharsets.UTF_8));
        if (asked.has("tags")) {
            message.setTag(text(asked, "tags"));
        }
        if (asked.has("keys")) {
            message.setKeys(text(asked, "keys"));
        }
        if (asked.has("group")) {
            message.setMessageGroup(text(asked, "group"));
        }
        if (asked.has("deliver_in_s")) {
            long delayMs = 1000 * asked.get("deliver_in_s").getAsLong();
            message.setDeliveryTimestamp(System.currentTimeMillis() + delayMs);
        }
        if (asked.has("properties")) {
            JsonObject properties = asked.getAsJsonObject("properties");
            properties.entrySet().forEach(
                    each -> message.addProperty(each.getKey(), each.getValue().getAsString()));
        }
        SendReceipt receipt;
        if (asked.has("transaction")) {
            Transaction transaction = producer.beginTransaction();
            receipt = producer.send(message.build(), transaction);
            if (text(asked, "transaction").equals("commit")) {
                transaction.commit();
            } else if (text(asked, "transaction").equals("rollback")) {
                transaction.rollback();
            }
        } else {
            receipt = producer.send(message.build());
        }
        JsonObject answer = line("message_id", receipt.getMessageId().toString());
        if (asked.has("recall")) {
            String recalled =
                    producer.recallMessage(text(asked, "topic"), receipt.getRecallHandle())
                            .getMessageId()
                            .toString();
            answer.addProperty("recalled", recalled);
        }
        return answer;
    }

    private static void sendMany(Producer producer, String topic, int wanted)
            throws InterruptedException {
        AtomicInteger acknowledged = new AtomicInteger();
        AtomicInteger number = new AtomicInteger();
        Runnable keepSending = () -> {
            while (acknowledged.get() < wanted) {
                String body = String.format("m%06d", number.getAndIncrement());
                JsonObject asked = line("topic", topic);
                asked.addProperty("body", body);
                asked.addProperty("tags", "F");
                asked.addProperty("keys", body);
                try {
                    JsonObject answer = sent(producer, asked);
                    answer.addProperty("acknowledged", body);
                    acknowledged.incrementAndGet();
                    put(answer);
                } catch (ClientException | RuntimeException error) {
                    JsonObject failure = line("failed", body);
                    failure.addProperty("error", error.toString());
                    put(failure);
                }
            }
        };
        List<Thread> senders = new ArrayList<>();
        for (int count = 0; count < SENDERS; count++) {
            senders.add(new Thread(keepSending));
        }
        senders.forEach(Thread::start);
        for (Thread sender : senders) {
            sender.join();
        }
        put(line("done", wanted));
    }

    private static TransactionResolution check(MessageView message) {
        JsonObject line = line("checked", body(message));
        line.addProperty("message_id", message.getMessageId().toString());
        put(line);
        return TransactionResolution.COMMIT;
    }

    private static void produce(ClientConfiguration configuration, String topic)
            throws ClientException, IOException, InterruptedException {
        Producer producer =
                PROVIDER.newProducerBuilder()
                        .setClientConfiguration(configuration)
                        .setTopics(topic)
                        .setTransactionChecker(GrpcClient::check)
                        .build();
        put(line("ready", true));
        BufferedReader input = input();
        for (String text = input.readLine(); text != null; text = input.readLine()) {
            JsonObject asked = JSON.fromJson(text, JsonObject.class);
            if (asked.has("many")) {
                sendMany(producer, asked.get("topic").getAsString(), asked.get("many").getAsInt());
                continue;
            }
            try {
                put(sent(producer, asked));
            } catch (ClientException | RuntimeException error) {
                put(line("error", error.toString()));
            }
        }
        producer.close();
    }

    // ------------------------------------------------------------------------- consumers

    private static String body(MessageView message) {
        return StandardCharsets.UTF_8.decode(message.getBody()).toString();
    }

    private static boolean isRefused(MessageView message) {
        String body = body(message);
        return body.startsWith("never")
                || body.startsWith("again") && message.getDeliveryAttempt() == 1;
    }

    private static JsonObject seen(MessageView message) {
        JsonObject line = line("body", body(message));
        line.add("tags", JSON.toJsonTree(message.getTag().orElse(null)));
        line.add("keys", JSON.toJsonTree(new TreeSet<>(message.getKeys())));
        line.add("properties", JSON.toJsonTree(message.getProperties()));
        line.add("group", JSON.toJsonTree(message.getMessageGroup().orElse(null)));
        line.addProperty("message_id", message.getMessageId().toString());
        line.addProperty("attempt", message.getDeliveryAttempt());
        line.addProperty("corrupted", ((MessageViewImpl) message).isCorrupted());
        line.addProperty("received_ms", System.currentTimeMillis());
        return line;
    }

    private static void readAll() {
        try {
            System.in.transferTo(PrintStream.nullOutputStream());
        } catch (IOException error) {
            System.err.println(error);
        }
    }

    private static CompletableFuture<Void> settle(SimpleConsumer consumer, MessageView message) {
        boolean isRefused = isRefused(message);
        CompletableFuture<Void> settling =
                isRefused
                        ? consumer.changeInvisibleDurationAsync(message, SOON)
                        : consumer.ackAsync(message);
        return settling.handle((nothing, error) -> {
            String id = message.getMessageId().toString();
            if (error != null) {
                JsonObject line = line("unsettled", id);
                line.addProperty("error", error.toString());
                put(line);
            } else if (!isRefused) {
                put(line("settled", id));
            }
            return null;
        });
    }

    private static void receive(
            ClientConfiguration configuration, String group, Map<String, FilterExpression> wanted)
            throws ClientException, IOException, InterruptedException {
        SimpleConsumer consumer =
                PROVIDER.newSimpleConsumerBuilder()
                        .setClientConfiguration(configuration)
                        .setConsumerGroup(group)
                        .setAwaitDuration(AWAIT)
                        .setSubscriptionExpressions(wanted)
                        .build();
        put(line("ready", true));
        AtomicBoolean isStopped = new AtomicBoolean();
        Thread waiting = new Thread(() -> {
            readAll();
            isStopped.set(true);
        });
        waiting.setDaemon(true);
        waiting.start();
        while (!isStopped.get()) {
            List<MessageView> messages = Collections.emptyList();
            try {
                messages = consumer.receive(BATCH_SIZE, INVISIBLE);
            } catch (ClientException | RuntimeException error) {
                put(line("no_answer", error.toString()));
                Thread.sleep(PAUSE_MS);
            }
            messages.forEach(message -> put(seen(message)));
            CompletableFuture.allOf(
                            messages.stream()
                                    .map(message -> settle(consumer, message))
                                    .toArray(CompletableFuture[]::new))
                    .join();
        }
        consumer.close();
    }

    private static void push(
            ClientConfiguration configuration, String group, Map<String, FilterExpression> wanted)
            throws ClientException {
        PROVIDER.newPushConsumerBuilder()
                        .setClientConfiguration(configuration)
                        .setConsumerGroup(group)
                        .setSubscriptionExpressions(wanted)
                        .setMessageListener(message -> {
                            put(seen(message));
                            return isRefused(message)
                                    ? ConsumeResult.FAILURE
                                    : ConsumeResult.SUCCESS;
                        })
                        .build();
        put(line("ready", true));
        // Not closed: that waits for the receive under way, up to 20 s where nothing comes.
        readAll();
    }

    // ------------------------------------------------------------------------------ load

    private static void report(String kind, String key, String reason) {
        JsonObject line = line("kind", kind);
        line.addProperty("key", key);
        line.addProperty("at_ms", System.nanoTime() / 1_000_000);
        line.addProperty("reason", reason);
        put(line);
    }

    private static void keepSending(
            Producer producer, String prefix, String stream, AtomicBoolean isStopped, long periodMs) {
        for (long number = 0; !isStopped.get(); number++) {
            String key = stream + "-" + number;
            JsonObject asked = line("topic", prefix + "-" + stream);
            asked.addProperty("body", key);
            if (stream.equals("ordered")) {
                asked.addProperty("group", "one");
            }
            try {
                sent(producer, asked);
                report("sent", key, "");
            } catch (ClientException | RuntimeException error) {
                report("failed", key, error.toString());
            }
            try {
                Thread.sleep(periodMs);
            } catch (InterruptedException interrupted) {
                return;
            }
        }
    }

    /**
     * The client as an application has it: a producer, and a push consumer each of a plain and of an
     * ordered topic, with default settings. A line that comes in ends the sending.
     */
    private static void load(String endpoints, String prefix, long periodMs) throws Exception {
        ClientConfiguration configuration =
                ClientConfiguration.newBuilder().setEndpoints(endpoints).enableSsl(false).build();
        List<String> streams = List.of("plain", "ordered");
        String[] topics =
                streams.stream().map(stream -> prefix + "-" + stream).toArray(String[]::new);
        for (String topic : topics) {
            PROVIDER.newPushConsumerBuilder()
                    .setClientConfiguration(configuration)
                    .setConsumerGroup(topic)
                    .setSubscriptionExpressions(Map.of(topic, FilterExpression.SUB_ALL))
                    .setMessageListener(message -> {
                        report("consumed", body(message), "");
                        return ConsumeResult.SUCCESS;
                    })
                    .build();
        }
        Producer producer =
                PROVIDER.newProducerBuilder()
                        .setClientConfiguration(configuration)
                        .setTopics(topics)
                        .build();
        AtomicBoolean isStopped = new AtomicBoolean();
        for (String stream : streams) {
            new Thread(() -> keepSending(producer, prefix, stream, isStopped, periodMs)).start();
        }
        BufferedReader input = input();
        input.readLine();
        isStopped.set(true);
        while (input.readLine() != null) {
            continue;
        }
    }

    public static void main(String[] args) throws Exception {
        if (args[0].equals("load")) {
            load(args[1], args[2], Long.parseLong(args[3]));
            System.exit(0);
        }
        ClientConfiguration configuration =
                configuration(JSON.fromJson(args[1], JsonObject.class), args[2]);
        if (args[0].equals("produce")) {
            produce(configuration, args[3]);
        } else {
            FilterExpression expression =
                    new FilterExpression(args[5], FilterExpressionType.TAG);
            Map<String, FilterExpression> wanted = Collections.singletonMap(args[4], expression);
            if (args[0].equals("push")) {
                push(configuration, args[3], wanted);
            } else {
                receive(configuration, args[3], wanted);
            }
        }
        System.exit(0);
    }
}
