// Which storage lies at a time and an offset: a segment tree over half steps. A storage stands in the O(log steps)
// nodes that make up its lifetime; storages in one node are all alive throughout it, so they are disjoint, and sorted
// by offset.
class Alive {
  constructor(plan) {
    this.plan = plan;
    this.leaves = Math.max(2 * plan.steps, 1);
    const order = Int32Array.from({ length: plan.count }, (_, i) => i).filter(i => plan.size[i] > 0);
    order.sort((a, b) => plan.offset[a] - plan.offset[b] || a - b);
    this.start = new Int32Array(2 * this.leaves + 1);
    for (const i of order) this.#nodes(i, node => this.start[node + 1]++);
    for (let node = 0; node < 2 * this.leaves; node++) this.start[node + 1] += this.start[node];
    this.list = new Int32Array(this.start[2 * this.leaves]);
    const at = this.start.slice();
    for (const i of order) this.#nodes(i, node => { this.list[at[node]++] = i; });
  }

  #nodes(i, visit) {
    let low = this.plan.from[i] + this.leaves, high = this.plan.until[i] + this.leaves;
    for (; low < high; low >>= 1, high >>= 1) {
      if (low & 1) visit(low++);
      if (high & 1) visit(--high);
    }
  }

  /** Position in a node's list just past the last storage whose offset is at most `offset`. */
  #past(node, offset) {
    let low = this.start[node], high = this.start[node + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.plan.offset[this.list[middle]] <= offset) low = middle + 1; else high = middle;
    }
    return low;
  }

  #path(half, visit) {
    if (half < 0 || half >= this.leaves) return;
    for (let node = half + this.leaves; node >= 1; node >>= 1) visit(node);
  }

  /** The storage that covers a byte at a half step, or -1. */
  find(half, offset) {
    let found = -1;
    this.#path(half, node => {
      const at = this.#past(node, offset) - 1;
      if (at < this.start[node]) return;
      const i = this.list[at];
      if (offset < this.plan.offset[i] + this.plan.size[i]) found = i;
    });
    return found;
  }

  /** The nearest storage below `offset` (exclusive) at a half step, or -1. */
  below(half, offset) {
    let found = -1;
    this.#path(half, node => {
      const at = this.#past(node, offset - 1) - 1;
      if (at < this.start[node]) return;
      const i = this.list[at];
      if (found < 0 || this.plan.offset[i] > this.plan.offset[found]) found = i;
    });
    return found;
  }

  /** The nearest storage that begins at `offset` or above at a half step, or -1. */
  above(half, offset) {
    let found = -1;
    this.#path(half, node => {
      const at = this.#past(node, offset - 1);
      if (at >= this.start[node + 1]) return;
      const i = this.list[at];
      if (found < 0 || this.plan.offset[i] < this.plan.offset[found]) found = i;
    });
    return found;
  }

  /** Storages alive during a step; where bytes change hands, both. */
  during(step) {
    const found = new Set();
    for (const half of [2 * step, 2 * step + 1]) this.#path(half, node => {
      for (let at = this.start[node]; at < this.start[node + 1]; at++) found.add(this.list[at]);
    });
    return [...found];
  }
}
