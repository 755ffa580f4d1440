import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.commons.cli.Option;
import org.apache.commons.cli.Options;
import org.apache.rocketmq.tools.command.MQAdminStartup;
import org.apache.rocketmq.tools.command.SubCommand;

/**
 * RocketMQ's mqadmin, one command after the other in one process: a line with the words of a
 * command comes in, what it printed goes out.
 */
public final class MqAdmin {
    private static final int LOOK_MS = 20;
    private static final int STOP_MS = 10_000;

    private MqAdmin() {}

    public static void main(String[] args) throws Exception {
        Lines.keepOutput();
        Lines.put(Lines.line("commands", options()));
        Lines.put(Lines.line("ready", true));
        for (Map<?, ?> asked = Lines.next(); asked != null; asked = Lines.next()) {
            Lines.put(done((List<?>) asked.get("words"), (Integer) asked.get("limit_ms")));
        }
        System.exit(0);
    }

    /** Return the options of each command that there is. */
    private static Map<String, Object> options() throws Exception {
        MQAdminStartup.initCommand();
        Map<String, Object> found = new LinkedHashMap<>();
        for (Field field : MQAdminStartup.class.getDeclaredFields()) {
            if (!List.class.isAssignableFrom(field.getType())) {
                continue;
            }
            field.setAccessible(true);
            for (Object command : (List<?>) field.get(null)) {
                List<String> names = new ArrayList<>();
                Options options = ((SubCommand) command).buildCommandlineOptions(new Options());
                for (Object option : options.getOptions()) {
                    Option known = (Option) option;
                    names.add("-" + known.getOpt() + (known.isRequired() ? " required" : ""));
                }
                found.put(((SubCommand) command).commandName(), names);
            }
        }
        return found;
    }

    /**
     * Return whether a command comes to its end in time. When it has printed all, the client of 5.5.0
     * waits for a thread that looks up every 3 s: that wait is cut short.
     */
    private static boolean ends(Thread command, int limitMs) throws InterruptedException {
        for (int waited = 0; command.isAlive() && waited < limitMs; waited += LOOK_MS) {
            command.join(LOOK_MS);
            for (StackTraceElement frame : command.getStackTrace()) {
                if (frame.getClassName().endsWith(".ServiceThread") && frame.getMethodName().equals("shutdown")) {
                    command.interrupt();
                    break;
                }
            }
        }
        return !command.isAlive();
    }

    /** Run a command; one that does not end by itself is interrupted. */
    private static Map<String, Object> done(List<?> words, int limitMs) throws Exception {
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream before = System.err;
        PrintStream both = new PrintStream(printed, true, StandardCharsets.UTF_8);
        System.setOut(both);
        System.setErr(both);
        Thread thread = new Thread(
            () -> MQAdminStartup.main0(words.toArray(new String[0]), null), "command");
        thread.setDaemon(true);
        thread.start();
        boolean ended = ends(thread, limitMs);
        if (!ended) {
            thread.interrupt();
            ends(thread, STOP_MS);
        }
        System.setOut(before);
        System.setErr(before);
        return Lines.line("ended", ended, "printed", printed.toString(StandardCharsets.UTF_8));
    }
}
