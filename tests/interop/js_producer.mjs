// The JavaScript client as a producer: a request a line comes in, an answer a line goes out.
// Without an answer for its time it sends again, and the message may be stored twice.

import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const [modules, producerGroup, nameSrv, timeoutMs = '10000'] = process.argv.slice(2);
const sendMsgTimeout = Number(timeoutMs);
const require = createRequire(`${modules}/`);
const { Producer, Message } = require('ali-ons');
const httpclient = require('urllib');

const quiet = { info() {}, warn() {}, error() {}, debug() {} };
const say = line => process.stdout.write(`${JSON.stringify(line)}\n`);

const producer = new Producer({ httpclient, producerGroup, nameSrv, sendMsgTimeout, logger: quiet });
// Its background tasks report brokers that are away; send() reports what became of a send.
producer.on('error', () => {});
await producer.ready();
say({ ready: true });
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  const message = new Message(asked.topic, asked.tags ?? '', asked.body);
  if (asked.keys) message.keys = asked.keys.split(" ");
  if (asked.delay_level) message.delayTimeLevel = asked.delay_level;
  for (const [name, value] of Object.entries(asked.properties ?? {})) {
    message.properties[name] = value;
  }
  try {
    const sent = await producer.send(message);
    say({
      status: sent.sendStatus,
      msg_id: sent.msgId,
      queue_id: sent.messageQueue.queueId,
      offset: sent.queueOffset,
    });
  } catch (error) {
    say({ error: `${error.name}: ${error.message}` });
  }
}
await producer.close();
process.exit(0);
