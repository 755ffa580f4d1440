//! Apache's Rust client of the gRPC protocol, as a producer or a simple consumer. A request a line
//! comes in, lines of JSON go out.
//!
//! Arguments: the part, endpoints, and the part's own.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Value};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

const SENDERS: usize = 16;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const LONG_POLLING: Duration = Duration::from_secs(5);
const INVISIBLE: Duration = Duration::from_secs(10);
const BATCH_SIZE: i32 = 32;
const PAUSE: Duration = Duration::from_millis(200);

fn put(line: Value) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}").expect("standard output is open");
    output.flush().expect("standard output is open");
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970")
}

fn options(endpoints: &str) -> ClientOption {
    let mut options = ClientOption::default();
    options.set_access_url(endpoints);
    options.set_enable_tls(false);
    options.set_timeout(REQUEST_TIMEOUT);
    options.set_long_polling_timeout(LONG_POLLING);
    options
}

// -------------------------------------------------------------------------------- producer

fn made(asked: &Value) -> MessageBuilder {
    let topic = asked["topic"].as_str().expect("a topic");
    let body = asked["body"].as_str().expect("a body").as_bytes().to_vec();
    let mut message = if let Some(group) = asked["group"].as_str() {
        MessageBuilder::fifo_message_builder(topic, body, group)
    } else if let Some(delay_s) = asked["deliver_in_s"].as_i64() {
        let deliver_at_s = now().as_secs() as i64 + delay_s;
        MessageBuilder::delay_message_builder(topic, body, deliver_at_s)
    } else if asked["transaction"].is_string() {
        MessageBuilder::transaction_message_builder(topic, body)
    } else {
        MessageBuilder::builder().set_topic(topic).set_body(body)
    };
    if let Some(tag) = asked["tags"].as_str() {
        message = message.set_tag(tag);
    }
    if let Some(key) = asked["keys"].as_str() {
        message = message.set_keys(vec![key]);
    }
    if let Some(properties) = asked["properties"].as_object() {
        let properties: HashMap<String, String> = properties
            .iter()
            .map(|(name, value)| (name.clone(), value.as_str().expect("a text").to_string()))
            .collect();
        message = message.set_properties(properties);
    }
    message
}

async fn sent(producer: &Producer, asked: &Value) -> Result<Value, String> {
    let message = made(asked).build().map_err(|error| error.to_string())?;
    let Some(end) = asked["transaction"].as_str() else {
        let receipt = producer.send(message).await.map_err(|error| error.to_string())?;
        return Ok(json!({"message_id": receipt.message_id()}));
    };
    let transaction = producer
        .send_transaction_message(message)
        .await
        .map_err(|error| error.to_string())?;
    let answer = json!({"message_id": transaction.message_id()});
    match end {
        "commit" => transaction.commit().await.map_err(|error| error.to_string())?,
        "rollback" => transaction.rollback().await.map_err(|error| error.to_string())?,
        _ => (),
    }
    Ok(answer)
}

async fn send_many(producer: &Arc<Producer>, topic: &str, wanted: u64) {
    let acknowledged = Arc::new(AtomicU64::new(0));
    let number = Arc::new(AtomicU64::new(0));
    let senders: Vec<_> = (0..SENDERS)
        .map(|_| {
            let (producer, topic) = (producer.clone(), topic.to_string());
            let (acknowledged, number) = (acknowledged.clone(), number.clone());
            tokio::spawn(async move {
                while acknowledged.load(Ordering::SeqCst) < wanted {
                    let body = format!("m{:06}", number.fetch_add(1, Ordering::SeqCst));
                    let asked = json!({"topic": topic, "body": body, "tags": "F", "keys": body});
                    match sent(&producer, &asked).await {
                        Ok(mut answer) => {
                            acknowledged.fetch_add(1, Ordering::SeqCst);
                            answer["acknowledged"] = json!(body);
                            put(answer);
                        }
                        Err(error) => put(json!({"failed": body, "error": error})),
                    }
                }
            })
        })
        .collect();
    for sender in senders {
        sender.await.expect("a sender ends well");
    }
    put(json!({"done": wanted}));
}

async fn produce(endpoints: &str, topic: &str) {
    let mut option = ProducerOption::default();
    option.set_topics(vec![topic]);
    let checker = Box::new(|_: String, message: MessageView| {
        let body = String::from_utf8_lossy(message.body());
        put(json!({"checked": body, "message_id": message.message_id()}));
        TransactionResolution::COMMIT
    });
    let mut producer = Producer::new_transaction_producer(option, options(endpoints), checker)
        .expect("a producer");
    producer.start().await.expect("the producer starts");
    let producer = Arc::new(producer);
    put(json!({"ready": true}));
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = input.next_line().await.expect("standard input is text") {
        let asked: Value = serde_json::from_str(&line).expect("a line of JSON");
        if let Some(wanted) = asked["many"].as_u64() {
            send_many(&producer, topic, wanted).await;
            continue;
        }
        put(sent(&producer, &asked).await.unwrap_or_else(|error| json!({"error": error})));
    }
    let producer = Arc::into_inner(producer).expect("no sender is left");
    producer.shutdown().await.expect("the producer stops");
}

// -------------------------------------------------------------------------------- consumer

fn seen(message: &MessageView) -> Value {
    let mut keys = message.keys().to_vec();
    keys.sort();
    json!({
        "body": String::from_utf8_lossy(message.body()),
        "tags": message.tag(),
        "keys": keys,
        "properties": message.properties(),
        "group": message.message_group(),
        "message_id": message.message_id(),
        "attempt": message.delivery_attempt(),
        "corrupted": false,
        "received_ms": now().as_millis() as u64,
    })
}

/// Acknowledges; a message that is refused comes again in its time: the client has no call for it.
async fn settle(consumer: Arc<SimpleConsumer>, message: MessageView) {
    if message.body().starts_with(b"again") && message.delivery_attempt() == 1 {
        return;
    }
    match consumer.ack(&message).await {
        Ok(()) => put(json!({"settled": message.message_id()})),
        Err(error) => {
            put(json!({"unsettled": message.message_id(), "error": error.to_string()}));
        }
    }
}

async fn receive(endpoints: &str, group: &str, topic: &str, expression: &str) {
    let mut option = SimpleConsumerOption::default();
    option.set_consumer_group(group);
    option.set_topics(vec![topic]);
    let mut consumer = SimpleConsumer::new(option, options(endpoints)).expect("a consumer");
    consumer.start().await.expect("the consumer starts");
    let consumer = Arc::new(consumer);
    put(json!({"ready": true}));
    let is_stopped = Arc::new(AtomicBool::new(false));
    let stop = is_stopped.clone();
    tokio::spawn(async move {
        let mut rest = Vec::new();
        let _ = tokio::io::stdin().read_to_end(&mut rest).await;
        stop.store(true, Ordering::SeqCst);
    });
    let filter = FilterExpression::new(FilterType::Tag, expression);
    while !is_stopped.load(Ordering::SeqCst) {
        match consumer.receive_with(topic, &filter, BATCH_SIZE, INVISIBLE).await {
            Ok(messages) => {
                let settling: Vec<_> = messages
                    .into_iter()
                    .map(|message| {
                        put(seen(&message));
                        tokio::spawn(settle(consumer.clone(), message))
                    })
                    .collect();
                for each in settling {
                    each.await.expect("it is settled, or not");
                }
            }
            Err(error) => {
                put(json!({"no_answer": error.to_string()}));
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    let consumer = Arc::into_inner(consumer).expect("nothing is left to settle");
    consumer.shutdown().await.expect("the consumer stops");
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["produce", endpoints, topic] => produce(endpoints, topic).await,
        ["receive", endpoints, group, topic, expression] => {
            receive(endpoints, group, topic, expression).await;
        }
        _ => panic!("produce ENDPOINTS TOPIC, or receive ENDPOINTS GROUP TOPIC EXPRESSION"),
    }
    std::process::exit(0);
}
