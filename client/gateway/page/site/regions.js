// Where regions are that peers state, by the names that people and clouds give them: [latitude, longitude] in degrees.

const KNOWN = {
  ae: [24, 54], ar: [-34, -64], at: [47.6, 14.1], au: [-25, 134], bd: [24, 90], be: [50.6, 4.7], bg: [42.7, 25.5], br: [-10, -53], by: [53.7, 28],
  ca: [56, -106], ch: [46.8, 8.2], cl: [-33, -71], cn: [35, 104], co: [4, -73], cy: [35, 33], cz: [49.8, 15.5], de: [51, 10.4], dk: [56, 9.5], dz: [28, 3],
  ec: [-1.5, -78.4], ee: [58.7, 25.5], eg: [27, 30], es: [40.2, -3.6], et: [9, 40], fi: [64, 26], fr: [46.6, 2.4], gb: [53, -1.8], ge: [42, 43.5], gh: [8, -1.2],
  gr: [39.3, 22], hk: [22.3, 114.2], hr: [45.3, 16], hu: [47.2, 19.4], id: [-2, 118], ie: [53.2, -8], il: [31.4, 35], in: [22, 79], ir: [32, 53], is: [64.9, -18.6],
  it: [42.8, 12.5], jp: [36.5, 138], ke: [0.5, 38], kr: [36.4, 127.9], kz: [48, 67], lt: [55.2, 23.9], lu: [49.8, 6.1], lv: [56.9, 24.9], ma: [32, -6], mx: [23.6, -102],
  my: [4, 102], ng: [9.5, 8], nl: [52.2, 5.5], no: [62, 10], np: [28.2, 84], nz: [-41, 174], pe: [-9, -75], ph: [12.5, 122], pk: [30, 69.5], pl: [52.1, 19.4],
  pt: [39.6, -8], ro: [45.9, 25], rs: [44, 20.8], ru: [58, 60], sa: [24, 45], se: [62, 16], sg: [1.35, 103.8], si: [46.1, 14.8], sk: [48.7, 19.5], th: [15.5, 101],
  tr: [39, 35], tw: [23.7, 121], ua: [49, 31.5], us: [39.5, -98], uy: [-33, -56], vn: [16, 107.5], za: [-29, 25],
  uk: [53, -1.8], "us-east": [38.9, -77.5], "us-west": [41, -121], "us-central": [41.3, -95.9], "us-south": [31, -97], "ca-central": [45.5, -73.6],
  "eu-west": [53.3, -6.3], "eu-central": [50.1, 8.7], "eu-north": [59.3, 18], "eu-south": [45.5, 9.2], europe: [50, 10], "north-america": [42, -97],
  "south-america": [-15, -58], "sa-east": [-23.5, -46.6], africa: [3, 20], "af-south": [-33.9, 18.4], "me-south": [26, 50.5], "me-central": [24, 54],
  "ap-south": [19.1, 72.9], "ap-southeast": [1.35, 103.8], "ap-northeast": [35.7, 139.7], "ap-east": [22.3, 114.2], asia: [34, 100], australia: [-25, 134], oceania: [-25, 140],
};

// The place of a region, null if its name is none that is known: `DE`, `us-east-1` and `de, Berlin` are.
export function placeOf(region) {
  const name = String(region ?? "").trim().toLowerCase().replace(/[\s_]+/g, "-");
  for (const part of [name, name.replace(/-?\d+[a-z]?$/, ""), name.split(/[-,/]/)[0]]) if (Object.hasOwn(KNOWN, part)) return KNOWN[part];
  return null;
}

// Mercator's projection, in which a direction on the map is the direction: x and y from 0 to 1 over the whole world.
export function projected([latitude, longitude]) {
  const held = Math.max(-78, Math.min(78, latitude));
  const y = Math.log(Math.tan(Math.PI / 4 + (held * Math.PI) / 360));
  return { x: longitude / 360 + 0.5, y: 0.5 - y / (2 * Math.PI) };
}

// The coasts of a TopoJSON file, each as a ring of projected points.
export function coasts(topology) {
  const { scale, translate } = topology.transform;
  const arcs = topology.arcs.map((arc) => {
    let [x, y] = [0, 0];
    return arc.map(([dx, dy]) => projected([(y += dy) * scale[1] + translate[1], (x += dx) * scale[0] + translate[0]]));
  });
  const rings = topology.objects.land.geometries.flatMap((geometry) => geometry.arcs.flat());
  return rings.flatMap((ring) => whole(ring.flatMap((at) => (at < 0 ? [...arcs[~at]].reverse() : arcs[at]))));
}

// A ring that goes over the edge of the map is there at both edges. One around a pole, which is Antarctica, is left out.
function whole(ring) {
  let turns = 0;
  const unrolled = ring.map(({ x, y }, at) => {
    if (at) turns -= Math.round(x - ring[at - 1].x);
    return { x: x + turns, y };
  });
  if (Math.abs(unrolled.at(-1).x - unrolled[0].x) > 0.5) return [];
  const over = unrolled.some(({ x }) => x > 1) ? -1 : unrolled.some(({ x }) => x < 0) ? 1 : 0;
  return over ? [unrolled, unrolled.map(({ x, y }) => ({ x: x + over, y }))] : [unrolled];
}
