// Decodes the binary frames specified in docs/explorer-api.md.

type Numbers = Float32Array | Int32Array | Uint8Array;

/** A row-major array. If `isRoot` is true, its dtype is √u8, and a byte b represents (b / 255)². */
export class Grid {
  constructor(
    readonly shape: number[],
    readonly values: Numbers,
    readonly isRoot = false,
  ) {}

  at(...indices: number[]): number {
    let index = 0;
    for (let axis = 0; axis < indices.length; axis++) index = index * this.shape[axis] + indices[axis];
    return this.flat(index);
  }

  flat(index: number): number {
    const value = this.values[index];
    return this.isRoot ? (value / 255) ** 2 : value;
  }

  /** Returns the subarray at fixed indices of the first axes, without copying. */
  slice(...indices: number[]): Grid {
    const shape = this.shape.slice(indices.length);
    const size = shape.reduce((product, n) => product * n, 1);
    let index = 0;
    for (let axis = 0; axis < indices.length; axis++) index = index * this.shape[axis] + indices[axis];
    return new Grid(shape, this.values.subarray(index * size, (index + 1) * size), this.isRoot);
  }

  list(): number[] {
    return Array.from(this.values, (_, index) => this.flat(index));
  }

  /** Returns the largest absolute value. */
  max(): number {
    let largest = 0;
    for (let i = 0; i < this.values.length; i++) {
      const value = this.flat(i);
      if (Number.isFinite(value) && Math.abs(value) > largest) largest = Math.abs(value);
    }
    return largest;
  }
}

export function gridFromRows(rows: number[][]): Grid {
  return new Grid([rows.length, rows[0]?.length ?? 0], Float32Array.from(rows.flat()));
}

interface BlobHeader {
  dtype: "f32" | "i32" | "√u8";
  shape: number[];
  offset: number;
}

/** Decodes a frame: a JSON header followed by arrays. In the header, {"blob": i} refers to array i. */
export function readFrame(bytes: Uint8Array): unknown {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = view.getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const grids = (header.blobs as BlobHeader[]).map((blob) => readGrid(blob, bytes.subarray(4 + length)));
  return insertGrids(header.data, grids);
}

function readGrid(blob: BlobHeader, rest: Uint8Array): Grid {
  const n = blob.shape.reduce((product, size) => product * size, 1);
  const width = blob.dtype === "√u8" ? 1 : 4;
  // Copy the bytes because a Float32Array must be aligned to 4 bytes, but a frame in a stream can start at any offset.
  const copy = rest.slice(blob.offset, blob.offset + n * width);
  if (blob.dtype === "√u8") return new Grid(blob.shape, copy, true);
  return new Grid(blob.shape, blob.dtype === "f32" ? new Float32Array(copy.buffer) : new Int32Array(copy.buffer));
}

function insertGrids(data: unknown, grids: Grid[]): unknown {
  if (Array.isArray(data)) return data.map((item) => insertGrids(item, grids));
  if (data === null || typeof data !== "object") return data;
  const entries = Object.entries(data);
  if (entries.length === 1 && entries[0][0] === "blob") return grids[entries[0][1] as number];
  return Object.fromEntries(entries.map(([name, value]) => [name, insertGrids(value, grids)]));
}

/** Yields the frames of a stream. Each frame is preceded by its length. */
export async function* readFrames(parts: AsyncIterable<Uint8Array>): AsyncGenerator<unknown> {
  let pending = new Uint8Array();
  for await (const part of parts) {
    const joined = new Uint8Array(pending.length + part.length);
    joined.set(pending);
    joined.set(part, pending.length);
    pending = joined;
    while (pending.length >= 4) {
      const length = new DataView(pending.buffer, pending.byteOffset).getUint32(0, true);
      if (pending.length < 4 + length) break;
      yield readFrame(pending.slice(4, 4 + length));
      pending = pending.slice(4 + length);
    }
  }
}
