// A small client of fastps, written from protos/README.md: it registers a tensor, pushes gradients and pulls values.
//
//   npm install && node client.js 127.0.0.1:7070
//
// It speaks to any number of shards, in float32. Left out: renewing the session (a program that is silent for longer than
// the lease needs it), reconnecting, and asking for the outcome of pushes without an answer.
'use strict';

const crypto = require('node:crypto');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const PROTO = path.join(__dirname, '../../protos/fastps/v1/fastps.proto');
// Numbers of slices exceed 2^53, so 64-bit numbers are text; without keepCase the names would be in camel case.
const OPTIONS = {keepCase: true, longs: String, enums: String, defaults: true};
const {fastps: {v1}} = grpc.loadPackageDefinition(loader.loadSync(PROTO, OPTIONS));
const SLICE = 63 * 4096;
const TIMEOUT_MS = 30_000;

class Refused extends Error {
  constructor(refusal) {
    super(`${refusal.kind}: ${refusal.message} (tensor ${refusal.tensor}, expected ${refusal.expected}, got ${refusal.got})`);
    this.refusal = refusal;
  }
}

// One stream of frames to a shard; answers find their requests by tag.
class Stream {
  constructor(call) {
    this.call = call;
    this.pending = new Map();
    this.tag = 0;
    call.on('data', (frame) => {
      const waiting = this.pending.get(frame.header.tag);
      this.pending.delete(frame.header.tag);
      if (frame.header.kind === 'KIND_REFUSED') waiting?.reject(new Refused(frame.header.refusal));
      else waiting?.resolve(frame);
    });
    const end = (error) => {
      for (const waiting of this.pending.values()) waiting.reject(error ?? new Error('the server ended the stream'));
      this.pending.clear();
    };
    call.on('error', end);
    call.on('end', () => end());
  }

  ask(header, payload = Buffer.alloc(0)) {
    const tag = String(++this.tag);
    return new Promise((resolve, reject) => {
      this.pending.set(tag, {resolve, reject});
      this.call.write({header: {...header, tag}, payload});
    });
  }
}

class Client {
  static async connect(address) {
    const client = new Client();
    client.client = (crypto.randomBytes(8).readBigUInt64LE() | 1n).toString();
    client.secret = crypto.randomBytes(16);
    client.sequence = 0;
    client.shards = [];
    const first = await client.hello(address);
    for (const listed of first.cluster) if (listed !== first.cluster[first.shard]) await client.hello(listed);
    return client;
  }

  async hello(address) {
    const credentials = grpc.credentials.createInsecure();
    // Each client has connections of its own.
    const options = {'grpc.use_local_subchannel_pool': 1, 'grpc.max_receive_message_length': 4 << 20};
    const shard = {control: new v1.Control(address, credentials, options), data: new v1.Data(address, credentials, options)};
    const request = {protocol_minor: 1, client: this.client, name: 'node', secret: this.secret};
    const answer = await this.unary(shard, 'Hello', request);
    shard.stream = new Stream(shard.data.Exchange(this.proof()));
    this.shards[answer.shard] = shard;
    this.epoch = answer.epoch;
    return answer;
  }

  proof() {
    const metadata = new grpc.Metadata();
    metadata.set('fastps-secret-bin', this.secret);
    return metadata;
  }

  unary(shard, method, request) {
    return new Promise((resolve, reject) => {
      const deadline = Date.now() + TIMEOUT_MS;
      const done = (error, answer) => (error ? reject(error) : resolve(answer));
      shard.control[method](request, this.proof(), {deadline}, done);
    });
  }

  // Frames for a slice have these fields.
  header(kind, tensor, k) {
    const {slices, group} = tensor.placement;
    return {kind, slice: slices[k], group, epoch: this.epoch, client: this.client};
  }

  values(tensor, k, values) {
    const part = values.subarray(k * SLICE, (k + 1) * SLICE);
    const fields = {count: part.length, codec: 'CODEC_FLOAT32', dtype: 'DTYPE_FLOAT32', sequence: this.sequence};
    // This machine is little-endian, as the wire is.
    return [fields, Buffer.from(part.buffer, part.byteOffset, part.byteLength)];
  }

  each(tensor, frame) {
    return Promise.all(tensor.placement.shards.map((shard, k) => this.shards[shard].stream.ask(...frame(k))));
  }

  async register(name, values, optimizer) {
    const spec = {name, shape: [values.length], dtype: 'DTYPE_FLOAT32', apply: 'APPLY_EXACT', group: 'default', optimizer};
    const ask = {spec, client: this.client};
    let place = await this.unary(this.shards[0], 'Register', ask);
    while (place.under_way) {
      await new Promise((resolve) => setTimeout(resolve, place.retry_after_ms));
      place = await this.unary(this.shards[0], 'Register', ask);
    }
    const tensor = {placement: place.placement, length: values.length};
    if (place.exists) return tensor;
    const {reservation, placement: {slices, shards, group}} = place;
    for (const shard of new Set(shards)) {
      const indices = [...shards.keys()].filter((k) => shards[k] === shard);
      const mine = {reservation, spec, slices: indices.map((k) => slices[k]), indices, group, client: this.client};
      await this.unary(this.shards[shard], 'Reserve', mine);
    }
    this.sequence += 1;
    await this.each(tensor, (k) => {
      const [fields, body] = this.values(tensor, k, values);
      return [{...this.header('KIND_ASSIGN', tensor, k), ...fields, reservation}, body];
    });
    for (const shard of new Set(shards)) await this.unary(this.shards[shard], 'Seal', {reservation});
    await this.unary(this.shards[0], 'Commit', {reservation, client: this.client});
    return tensor;
  }

  // The versions of the slices after the push.
  async push(tensor, gradient) {
    this.sequence += 1;
    const receipts = await this.each(tensor, (k) => {
      const [fields, body] = this.values(tensor, k, gradient);
      return [{...this.header('KIND_GRADIENT', tensor, k), ...fields}, body];
    });
    return receipts.map((receipt) => receipt.header.version);
  }

  async pull(tensor) {
    const answers = await this.each(tensor, (k) => [this.header('KIND_PULL', tensor, k)]);
    const bytes = Buffer.concat(answers.map((answer) => answer.payload));
    return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
  }

  async close() {
    for (const shard of this.shards) {
      shard.stream.call.end();
      await this.unary(shard, 'Hello', {protocol_minor: 1, client: this.client, secret: this.secret, renew: true, close: true});
      shard.control.close();
      shard.data.close();
    }
  }
}

async function main(address, length = 600_000) {
  // gRPC would take another port.
  if (!/^[^/@]+:[0-9]+$/.test(address)) throw new Error('invalid address: expected host:port');
  const client = await Client.connect(address);
  const sgd = {name: 'sgd', settings: {lr: 0.5}};
  const tensor = await client.register('node', new Float32Array(length), sgd);
  let versions;
  for (let step = 0; step < 10; step++) versions = await client.push(tensor, new Float32Array(length).fill(1));
  const values = await client.pull(tensor);
  console.log(JSON.stringify({versions, first: values[0], last: values[length - 1], length: values.length}));
  await client.close();
}

const address = process.argv[2] ?? '127.0.0.1:7070';
main(address).catch((error) => {
  // How HTTP/2 says that a server wants TLS.
  const hint = /Protocol not secure enough/.test(error.message) ? '; this port speaks TLS, and this example does not' : '';
  console.error(`${address}: ${error.message}${hint}`);
  process.exitCode = 1;
});
