// The part of a function's plane that a run needs, so that its picture uses all of its area.

/** Steps in which a part grows, and the share of it that stays free around what it shows. */
const STEP = 1.25;
const FREE = 1.3;
/** The smallest part, and where the whole plane is shown instead. */
const LEAST = 0.04;
const MOST = 0.8;

/**
 * A part with the proportions of the whole. It depends on the points alone, and on nothing that was shown before.
 *
 * @param view the whole plane: x0, x1, y0, y1
 * @param points that are in it, if they are in the plane
 */
export function partOf([x0, x1, y0, y1], points) {
  const [wide, high] = [x1 - x0, y1 - y0];
  let [left, right, low, top] = [1, 0, 1, 0];
  for (const [x, y] of points) {
    const [a, b] = [(x - x0) / wide, (y - y0) / high];
    if (!(a >= 0 && a <= 1 && b >= 0 && b <= 1)) continue;
    [left, right, low, top] = [Math.min(left, a), Math.max(right, a), Math.min(low, b), Math.max(top, b)];
  }
  const needed = Math.max(right - left, top - low, LEAST) * FREE;
  const size = STEP ** Math.ceil(Math.log(needed) / Math.log(STEP));
  if (left > right || size > MOST) return [x0, x1, y0, y1];
  // Its corner lies on a grid, so that it does not move with every update.
  const grid = (size - needed / FREE) / 4;
  const corner = (least, most) => Math.min(1 - size, Math.max(0, Math.round(((least + most - size) / 2) / grid) * grid));
  const [a, b] = [corner(left, right), corner(low, top)];
  return [x0 + a * wide, x0 + (a + size) * wide, y0 + b * high, y0 + (b + size) * high];
}
