import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.IntegerDeserializer;
import org.apache.kafka.common.serialization.LongDeserializer;

/** Prints the headers of the first record of a topic's only partition, one a line, as Kafka's own client reads them. */
public final class SpringHeaders {
    public static void main(String[] args) {
        Map<String, Object> settings = Map.of("bootstrap.servers", args[0]);
        TopicPartition partition = new TopicPartition(args[1], 0);
        ByteArrayDeserializer bytes = new ByteArrayDeserializer();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, bytes, bytes)) {
            consumer.assign(List.of(partition));
            consumer.seekToBeginning(List.of(partition));
            long until = System.nanoTime() + Duration.ofSeconds(30).toNanos();
            while (System.nanoTime() < until) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(500))) {
                    print(record);
                    return;
                }
            }
        }
        System.err.println("no record in " + partition);
        System.exit(1);
    }

    private static void print(ConsumerRecord<byte[], byte[]> record) {
        for (Header header : record.headers()) {
            String name = header.key();
            Object value = switch (name) {
                case "kafka_dlt-original-partition" -> new IntegerDeserializer().deserialize("", header.value());
                case "kafka_dlt-original-offset", "kafka_dlt-original-timestamp" ->
                    new LongDeserializer().deserialize("", header.value());
                default -> new String(header.value(), StandardCharsets.UTF_8).replace("\n", "|");
            };
            System.out.println(name + "=" + value);
        }
    }
}
