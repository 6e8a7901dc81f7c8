// Where the marks of a map go: those that lie on one point are drawn around it, so that each can be seen.

/** Pixels within which marks hide each other, and the radii around a shared point and around the server. */
const NEAR = 13;
const AROUND = 13;
const AROUND_SERVER = 25;
/** Pixels of a circle that a mark takes. */
const ROOM = 17;

/**
 * @param server point of the server's ring
 * @param points of the marks; they may be outside of the picture
 * @return for each mark the point where it is drawn, and the point that it belongs to
 */
export function placesOf(server, points) {
  const groups = [{ at: server, members: [], first: AROUND_SERVER }];
  const far = ([a, b], [c, d]) => Math.hypot(a - c, b - d);
  points.forEach((point, k) => {
    if (!Number.isFinite(point[0] + point[1])) return;
    const group = groups.find(({ at, first }) => far(at, point) < (first === AROUND_SERVER ? AROUND_SERVER - 4 : NEAR));
    if (group === undefined) groups.push({ at: point, members: [k], first: AROUND });
    else group.members.push(k);
  });
  const places = new Array(points.length).fill(null);
  for (const { at, members, first } of groups) {
    const alone = members.length === 1 && first === AROUND;
    circles(members.length, first).forEach(([dx, dy], k) => {
      const own = points[members[k]];
      places[members[k]] = { own, at: alone ? own : [at[0] + dx, at[1] + dy], moved: !alone };
    });
  }
  return places;
}

/** Offsets on circles around a point, each as full as it may be. */
function circles(count, first) {
  const offsets = [];
  for (let radius = first; offsets.length < count; radius += ROOM) {
    const room = Math.floor((2 * Math.PI * radius) / ROOM);
    const here = Math.min(room, count - offsets.length);
    for (let k = 0; k < here; k += 1) {
      const angle = (2 * Math.PI * k) / here - Math.PI / 2;
      offsets.push([radius * Math.cos(angle), radius * Math.sin(angle)]);
    }
  }
  return offsets;
}
