import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;

/** Lines of JSON, both ways. What the client prints by itself goes to standard error. */
final class Lines {
    private static final PrintStream OUT = System.out;
    private static final BufferedReader IN =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

    private Lines() {}

    /** Keep standard output for lines of JSON. */
    static void keepOutput() {
        System.setOut(System.err);
    }

    /** Return a line that holds names and values in turn. */
    static Map<String, Object> line(Object... namesAndValues) {
        Map<String, Object> line = new LinkedHashMap<>();
        for (int place = 0; place < namesAndValues.length; place += 2) {
            line.put((String) namesAndValues[place], namesAndValues[place + 1]);
        }
        return line;
    }

    /** Write one line. */
    static void put(Map<String, Object> line) {
        byte[] text = (RemotingSerializable.toJson(line, false) + "\n").getBytes(StandardCharsets.UTF_8);
        synchronized (OUT) {
            OUT.write(text, 0, text.length);
            OUT.flush();
        }
    }

    /** Return the next request, or null at the end. */
    static Map<?, ?> next() throws IOException {
        String line = IN.readLine();
        return line == null ? null : parsed(line);
    }

    /** Return what a line says. */
    static Map<?, ?> parsed(String line) {
        return RemotingSerializable.fromJson(line, Map.class);
    }

    /** Return when standard input ends. */
    static void waitForEnd() throws IOException {
        while (IN.readLine() != null) {
            continue;
        }
    }
}
