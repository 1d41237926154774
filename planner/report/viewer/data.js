// What the page holds: a compressed block of columns, and a plan made of them.

/** The bytes in the page: zlib, in it a length, a JSON header, and columns, each at a multiple of 8 bytes. */
async function unpack(text) {
  const letters = atob(text), packed = new Uint8Array(letters.length);
  for (let k = 0; k < packed.length; k++) packed[k] = letters.charCodeAt(k);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true), start = Math.ceil((4 + length) / 8) * 8;
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const kinds = { d: Float64Array, i: Int32Array };
  return { header, column: ([kind, at, count]) => new kinds[kind](buffer, start + at, count) };
}

/** One plan: columns by storage, tensor and step. Times are in half steps: bytes handed over in place change hands in
 * the middle of a step. */
class PlanData {
  constructor(record, column) {
    const columns = Object.fromEntries(Object.entries(record.columns).map(([name, where]) => [name, column(where)]));
    Object.assign(this, record, columns);
    this.count = this.names.length;
    this.arena = this.summary.arena_bytes;
    this.next = new Int32Array(this.count).fill(-1);
    for (let i = 0; i < this.count; i++) if (this.inPlaceOf[i] >= 0) this.next[this.inPlaceOf[i]] = i;
    this.from = new Int32Array(this.count);
    this.until = new Int32Array(this.count);
    for (let i = 0; i < this.count; i++) {
      this.from[i] = 2 * this.birth[i] + (this.inPlaceOf[i] >= 0 ? 1 : 0);
      this.until[i] = this.next[i] >= 0 ? 2 * this.birth[this.next[i]] + 1 : 2 * this.death[i];
    }
    this.peak = 0;
    for (let step = 0; step < this.steps; step++) if (this.live[step] > this.live[this.peak]) this.peak = step;
    this.tensorsOf = grouped(this.count, this.tensorStorage);
    this.alive = new Alive(this);
    this.indexOf = new Map(this.names.map((name, i) => [name, i]));
  }

  tensors(i) { return this.tensorsOf.list.subarray(this.tensorsOf.start[i], this.tensorsOf.start[i + 1]); }
  tensorName(k) { return this.tensorNames[k] === null ? this.names[this.tensorStorage[k]] : this.tensorNames[k]; }
  kind(k) { return this.dtypes[this.tensorDtype[k]] + "[" + this.shapes[this.tensorShape[k]] + "]"; }

  /** Storages that hand the same bytes on, first to last. */
  chain(i) {
    let first = i;
    for (let hops = 0; this.inPlaceOf[first] >= 0 && hops < this.count; hops++) first = this.inPlaceOf[first];
    const found = [];
    for (let k = first; k >= 0 && found.length < this.count; k = this.next[k]) found.push(k);
    return found;
  }

  /** Storages that step `k` reads, or writes. */
  reads(k) { return this.readList.subarray(this.readStart[k], this.readStart[k + 1]); }
  writes(k) { return this.writeList.subarray(this.writeStart[k], this.writeStart[k + 1]); }
  operation(k) {
    if (k < 0 || k >= this.operationNames.length) return null;
    return { name: this.operationNames[k], operator: this.operators[this.operator[k]],
      source: this.sources[this.source[k]], module: this.modules[this.operationModule[k]] };
  }

  /** Steps at which a storage is read, or written. */
  uses(i, start, list) {
    const found = [];
    const last = Math.min(this.death[i], this.operationNames.length);
    for (let k = this.birth[i]; k < last; k++)
      for (let at = start[k]; at < start[k + 1]; at++) if (list[at] === i) { found.push(k); break; }
    return found;
  }
}

/** Positions grouped by key, in order: those of key k are list[start[k]] to list[start[k + 1] - 1]. */
function grouped(count, keys) {
  const start = new Int32Array(count + 1), list = new Int32Array(keys.length);
  for (const key of keys) start[key + 1]++;
  for (let k = 0; k < count; k++) start[k + 1] += start[k];
  const at = start.slice(0, count);
  for (let position = 0; position < keys.length; position++) list[at[keys[position]]++] = position;
  return { start, list };
}
