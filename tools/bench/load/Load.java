import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * RocketMQ's own Java client as a load. Arguments and output: tools/bench/loads.py.
 *
 * <p>Up to 64 outstanding sends are synchronous, each in a thread of its own; more are asynchronous.
 */
public class Load {
    static final int MAX_SYNC = 64;
    static final int MAX_SAMPLES = 8_000_000;
    static final int FILL_BATCH = 100;
    static final int PULL_MESSAGES = 1000;

    static volatile boolean measuring;
    static volatile boolean stopping;
    static final long[] samples = new long[MAX_SAMPLES];
    static final AtomicInteger sampled = new AtomicInteger();
    static final AtomicLong messages = new AtomicLong();
    static final AtomicLong failed = new AtomicLong();

    public static void main(String[] a) throws Exception {
        String mode = a[0], address = a[1], topic = a[2];
        int outstanding = Integer.parseInt(a[3]), batch = Integer.parseInt(a[4]);
        byte[] body = new byte[Integer.parseInt(a[5])];
        double warm = Double.parseDouble(a[6]), seconds = Double.parseDouble(a[7]);
        int backlog = Integer.parseInt(a[8]);
        DefaultMQProducer producer = new DefaultMQProducer("peers-" + System.nanoTime());
        producer.setNamesrvAddr(address);
        producer.setSendMsgTimeout(mode.equals("kill") ? 3000 : 10000);
        producer.start();
        untilServed(producer, topic, body);
        if (mode.equals("drain")) {
            fill(producer, topic, body, backlog);
            drain(address, topic, outstanding, warm, seconds, backlog);
        } else {
            for (int i = 0; i < (outstanding <= MAX_SYNC ? outstanding : 1); i++) {
                Thread thread = new Thread(() -> {
                    if (mode.equals("kill")) sendAndReport(producer, topic, body);
                    else if (outstanding <= MAX_SYNC) sendSync(producer, topic, body, batch);
                    else sendAsync(producer, topic, body, outstanding);
                });
                thread.setDaemon(true);
                thread.start();
            }
            window(warm, seconds);
        }
        System.exit(0);
    }

    static void untilServed(DefaultMQProducer producer, String topic, byte[] body) throws Exception {
        for (int attempt = 0; ; attempt++) {
            try {
                if (producer.send(new Message(topic, body)).getSendStatus() == SendStatus.SEND_OK) return;
            } catch (Exception error) {
                if (attempt == 100) throw error;
            }
            if (attempt == 100) throw new IllegalStateException("no send was stored");
            Thread.sleep(300);
        }
    }

    static void window(double warm, double seconds) throws Exception {
        Thread.sleep((long) (warm * 1000));
        long began = System.nanoTime();
        measuring = true;
        System.out.println("begin");
        Thread.sleep((long) (seconds * 1000));
        measuring = false;
        double took = (System.nanoTime() - began) / 1e9;
        System.out.println("end");
        stopping = true;
        report(took);
    }

    static void report(double took) {
        long[] sorted = Arrays.copyOf(samples, Math.min(sampled.get(), MAX_SAMPLES));
        Arrays.sort(sorted);
        System.out.printf(Locale.ROOT,
            "result {\"messages\": %d, \"failed\": %d, \"seconds\": %.6f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"p999_ms\": %.4f}%n",
            messages.get(), failed.get(), took, rank(sorted, 0.5), rank(sorted, 0.99), rank(sorted, 0.999));
    }

    static double rank(long[] sorted, double part) {
        return sorted.length == 0 ? 0 : sorted[(int) (sorted.length * part)] / 1e6;
    }

    static void stored(long began, int count) {
        if (!measuring) return;
        messages.addAndGet(count);
        int place = sampled.getAndIncrement();
        if (place < MAX_SAMPLES) samples[place] = System.nanoTime() - began;
    }

    static void notStored(int count) {
        if (measuring) failed.addAndGet(count);
    }

    static void pause(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    static boolean send(DefaultMQProducer producer, String topic, byte[] body, int batch) {
        try {
            SendResult result;
            if (batch == 1) {
                result = producer.send(new Message(topic, body));
            } else {
                List<Message> list = new ArrayList<>(batch);
                for (int i = 0; i < batch; i++) list.add(new Message(topic, body));
                result = producer.send(list);
            }
            return result.getSendStatus() == SendStatus.SEND_OK;
        } catch (Exception error) {
            pause(2);
            return false;
        }
    }

    static void sendSync(DefaultMQProducer producer, String topic, byte[] body, int batch) {
        while (!stopping) {
            long began = System.nanoTime();
            if (send(producer, topic, body, batch)) stored(began, batch);
            else notStored(batch);
        }
    }

    static void sendAsync(DefaultMQProducer producer, String topic, byte[] body, int outstanding) {
        Semaphore free = new Semaphore(outstanding);
        while (!stopping) {
            free.acquireUninterruptibly();
            final long began = System.nanoTime();
            try {
                producer.send(new Message(topic, body), new SendCallback() {
                    public void onSuccess(SendResult result) {
                        if (result.getSendStatus() == SendStatus.SEND_OK) stored(began, 1);
                        else notStored(1);
                        free.release();
                    }

                    public void onException(Throwable error) {
                        notStored(1);
                        free.release();
                    }
                });
            } catch (Exception error) {
                notStored(1);
                free.release();
                pause(2);
            }
        }
    }

    static final AtomicLong reported = new AtomicLong();

    static void sendAndReport(DefaultMQProducer producer, String topic, byte[] body) {
        while (!stopping) {
            long began = System.currentTimeMillis();
            if (!send(producer, topic, body, 1)) continue;
            long ended = System.currentTimeMillis(), last = reported.get();
            if (ended > last && reported.compareAndSet(last, ended)) {
                System.out.println("ack " + began + " " + ended);
            }
        }
    }

    static void fill(DefaultMQProducer producer, String topic, byte[] body, int backlog) throws Exception {
        AtomicInteger left = new AtomicInteger(backlog);
        Thread[] threads = new Thread[8];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(() -> {
                while (left.getAndAdd(-FILL_BATCH) > 0) {
                    while (!send(producer, topic, body, FILL_BATCH)) { }
                }
            });
            threads[i].setDaemon(true);
            threads[i].start();
        }
        for (Thread thread : threads) thread.join();
    }

    static void drain(String address, String topic, int readers, double warm, double seconds, int backlog) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("peers-" + System.nanoTime());
        consumer.setNamesrvAddr(address);
        consumer.start();
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchSubscribeMessageQueues(topic));
        long there = 0;
        for (MessageQueue queue : queues) there += consumer.maxOffset(queue) - consumer.minOffset(queue);
        if (there < backlog) throw new IllegalStateException(there + " messages of " + backlog);
        for (int reader = 0; reader < readers; reader++) {
            int own = reader;
            Thread thread = new Thread(() -> {
                while (!stopping) {
                    for (int i = own; i < queues.size(); i += readers) read(consumer, queues.get(i));
                }
            });
            thread.setDaemon(true);
            thread.start();
        }
        window(warm, seconds);
    }

    static void read(DefaultMQPullConsumer consumer, MessageQueue queue) {
        long offset = 0;
        while (!stopping) {
            long began = System.nanoTime();
            try {
                PullResult result = consumer.pull(queue, "*", offset, PULL_MESSAGES);
                offset = result.getNextBeginOffset();
                if (result.getPullStatus() != PullStatus.FOUND) return;
                int read = 0;
                for (MessageExt message : result.getMsgFoundList()) {
                    if (message.getBody().length > 0) read++;
                }
                stored(began, read);
                if (offset >= result.getMaxOffset()) return;
            } catch (Exception error) {
                notStored(1);
                pause(2);
            }
        }
    }
}
