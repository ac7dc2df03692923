// How an answer's bytes become numbers: frames as docs/explorer-api.md describes them.

type Numbers = Float32Array | Int32Array | Uint8Array;

/** Numbers with axes, row-major; of dtype √u8 where `isRoot`, read as (byte / 255)². */
export class Grid {
  constructor(
    readonly shape: number[],
    readonly values: Numbers,
    readonly isRoot = false,
  ) {}

  at(...place: number[]): number {
    let index = 0;
    for (let axis = 0; axis < place.length; axis++) index = index * this.shape[axis] + place[axis];
    return this.flat(index);
  }

  flat(index: number): number {
    const value = this.values[index];
    return this.isRoot ? (value / 255) ** 2 : value;
  }

  /** What is left when the first axes are fixed; shares memory. */
  part(...place: number[]): Grid {
    const shape = this.shape.slice(place.length);
    const size = shape.reduce((product, n) => product * n, 1);
    let index = 0;
    for (let axis = 0; axis < place.length; axis++) index = index * this.shape[axis] + place[axis];
    return new Grid(shape, this.values.subarray(index * size, (index + 1) * size), this.isRoot);
  }

  list(): number[] {
    return Array.from(this.values, (_, index) => this.flat(index));
  }

  max(): number {
    let most = 0;
    for (let i = 0; i < this.values.length; i++) {
      const value = this.flat(i);
      if (Number.isFinite(value) && Math.abs(value) > most) most = Math.abs(value);
    }
    return most;
  }
}

export function gridOf(rows: number[][]): Grid {
  return new Grid([rows.length, rows[0]?.length ?? 0], Float32Array.from(rows.flat()));
}

interface Held {
  dtype: "f32" | "i32" | "√u8";
  shape: number[];
  offset: number;
}

/** One frame: a JSON header whose {"blob": i} stand for arrays behind it. */
export function readFrame(bytes: Uint8Array): unknown {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = view.getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const grids = (header.blobs as Held[]).map((held) => readGrid(held, bytes.subarray(4 + length)));
  return filled(header.data, grids);
}

function readGrid(held: Held, rest: Uint8Array): Grid {
  const n = held.shape.reduce((product, size) => product * size, 1);
  const width = held.dtype === "√u8" ? 1 : 4;
  // A copy: a stream's frames begin anywhere, and a Float32Array must begin at a multiple of 4.
  const own = rest.slice(held.offset, held.offset + n * width);
  if (held.dtype === "√u8") return new Grid(held.shape, own, true);
  return new Grid(held.shape, held.dtype === "f32" ? new Float32Array(own.buffer) : new Int32Array(own.buffer));
}

function filled(data: unknown, grids: Grid[]): unknown {
  if (Array.isArray(data)) return data.map((one) => filled(one, grids));
  if (data === null || typeof data !== "object") return data;
  const entries = Object.entries(data);
  if (entries.length === 1 && entries[0][0] === "blob") return grids[entries[0][1] as number];
  return Object.fromEntries(entries.map(([name, value]) => [name, filled(value, grids)]));
}

/** Frames of a stream as they come: each has its length before it. */
export async function* readFrames(parts: AsyncIterable<Uint8Array>): AsyncGenerator<unknown> {
  let waiting = new Uint8Array();
  for await (const part of parts) {
    const joined = new Uint8Array(waiting.length + part.length);
    joined.set(waiting);
    joined.set(part, waiting.length);
    waiting = joined;
    while (waiting.length >= 4) {
      const length = new DataView(waiting.buffer, waiting.byteOffset).getUint32(0, true);
      if (waiting.length < 4 + length) break;
      yield readFrame(waiting.slice(4, 4 + length));
      waiting = waiting.slice(4 + length);
    }
  }
}
