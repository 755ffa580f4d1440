// The JavaScript client as a push consumer: each message it is given is a line.
// One whose body ends with "!" is refused once, so that it has to come again.

import { createRequire } from 'node:module';

const [modules, consumerGroup, nameSrv, topic, expression] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const { Consumer } = require('ali-ons');
const httpclient = require('urllib');

const quiet = { info() {}, warn() {}, error() {}, debug() {} };
const say = line => process.stdout.write(`${JSON.stringify(line)}\n`);

const consumer = new Consumer({ httpclient, consumerGroup, nameSrv, logger: quiet });
// Its background tasks tell of brokers that are away; it goes on by itself.
consumer.on('error', () => {});
consumer.subscribe(topic, expression, async message => {
  const body = message.body.toString();
  say({
    topic: message.topic,
    body,
    tags: message.tags,
    keys: message.keys,
    id: message.msgId,
    queue_id: message.queueId,
    queue_offset: Number(message.queueOffset),
    reconsume_times: message.reconsumeTimes,
    origin: message.properties.kind ?? '',
  });
  if (body.endsWith('!') && message.reconsumeTimes === 0) throw new Error('refused');
});
await consumer.ready();
say({ ready: true });
process.stdin.resume();
process.stdin.on('end', async () => {
  await consumer.close();
  process.exit(0);
});
