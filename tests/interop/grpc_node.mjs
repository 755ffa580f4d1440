// Apache's Node.js client of the gRPC protocol, in one of three parts. A request a line comes in,
// lines of JSON go out.

import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const [tools, part, endpoints, ...rest] = process.argv.slice(2);
const {
  ConsumeResult, Producer, PushConsumer, SimpleConsumer,
} = createRequire(`${tools}/`)('rocketmq-client-nodejs');
const {
  TransactionResolution,
} = createRequire(`${tools}/`)('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

const SENDERS = 16;
const INVISIBLE_MS = 20_000;
const silent = { debug() {}, info() {}, warn: console.error, error: console.error };
const common = { endpoints, namespace: '', logger: silent, requestTimeout: 5000 };

function put(line) {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

// ------------------------------------------------------------------------------ producer

async function sent(producer, asked) {
  const options = { topic: asked.topic, body: Buffer.from(asked.body) };
  if (asked.tags) options.tag = asked.tags;
  if (asked.keys) options.keys = [asked.keys];
  if (asked.group) options.messageGroup = asked.group;
  if (asked.deliver_in_s) options.delay = asked.deliver_in_s * 1000;
  if (asked.properties) options.properties = new Map(Object.entries(asked.properties));
  let receipt;
  if (asked.transaction) {
    const transaction = producer.beginTransaction();
    receipt = await producer.send(options, transaction);
    if (asked.transaction === 'commit') await transaction.commit();
    if (asked.transaction === 'rollback') await transaction.rollback();
  } else {
    receipt = await producer.send(options);
  }
  const answer = { message_id: receipt.messageId, offset: Number(receipt.offset) };
  if (asked.recall) {
    answer.recalled = (await producer.recallMessage(asked.topic, receipt.recallHandle)).messageId;
  }
  return answer;
}

async function sendMany(producer, topic, wanted) {
  let acknowledged = 0;
  let number = 0;
  async function keepSending() {
    while (acknowledged < wanted) {
      const body = `m${String(number++).padStart(6, '0')}`;
      try {
        const answer = await sent(producer, { topic, body, tags: 'F', keys: body });
        acknowledged += 1;
        put({ acknowledged: body, ...answer });
      } catch (error) {
        put({ failed: body, error: String(error) });
      }
    }
  }
  await Promise.all(Array.from({ length: SENDERS }, keepSending));
  put({ done: wanted });
}

async function produce() {
  const checker = {
    async check(message) {
      put({ checked: message.body.toString(), message_id: message.messageId });
      return TransactionResolution.COMMIT;
    },
  };
  const producer = new Producer({ ...common, topic: rest, checker });
  await producer.startup();
  put({ ready: true });
  for await (const line of createInterface({ input: process.stdin })) {
    const asked = JSON.parse(line);
    if (asked.many) {
      await sendMany(producer, asked.topic, asked.many);
      continue;
    }
    try {
      put(await sent(producer, asked));
    } catch (error) {
      put({ error: String(error) });
    }
  }
  await producer.shutdown();
}

// ------------------------------------------------------------------------------ consumers

function seen(message) {
  return {
    body: message.body.toString(),
    tags: message.tag || null,
    keys: [...message.keys].sort(),
    properties: Object.fromEntries(message.properties),
    group: message.messageGroup || null,
    message_id: message.messageId,
    attempt: message.deliveryAttempt,
    corrupted: message.corrupted ?? false,
    received_ms: Date.now(),
  };
}

function again(message) {
  return message.body.toString().startsWith('again') && message.deliveryAttempt === 1;
}

async function whenInputEnds() {
  for await (const _ of process.stdin);
}

async function receive() {
  const [consumerGroup, topic, expression] = rest;
  const subscriptions = new Map().set(topic, expression);
  const consumer = new SimpleConsumer({
    ...common, consumerGroup, subscriptions, awaitDuration: 5000,
  });
  await consumer.startup();
  put({ ready: true });
  let stopped = false;
  whenInputEnds().then(() => { stopped = true; });
  while (!stopped) {
    let messages = [];
    try {
      messages = await consumer.receive(32, INVISIBLE_MS);
    } catch (error) {
      put({ no_answer: String(error) });
      await sleep(200);
    }
    messages.forEach((message) => put(seen(message)));
    await Promise.all(messages.map(async (message) => {
      try {
        if (again(message)) {
          await consumer.changeInvisibleDuration(message, 1000);
        } else {
          await consumer.ack(message);
          put({ settled: message.messageId });
        }
      } catch (error) {
        put({ unsettled: message.messageId, error: String(error) });
      }
    }));
  }
  await consumer.shutdown();
}

async function push() {
  const [consumerGroup, topic, expression] = rest;
  const consumer = new PushConsumer({
    ...common,
    consumerGroup,
    subscriptions: new Map([[topic, expression]]),
    messageListener: {
      async consume(message) {
        put(seen(message));
        return again(message) ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
      },
    },
  });
  await consumer.startup();
  put({ ready: true });
  await whenInputEnds();
  await consumer.shutdown();
}

await { produce, receive, push }[part]();
process.exit(0);
