// Colours of the two themes, and the scale of weights: equal steps of lightness in the perceptually uniform space OKLab.

const THEMES = {
  light: {
    paper: "#ffffff",
    ink: "#1f2433",
    faint: "#686e83",
    rule: "#e2e4ec",
    bar: "#6a63c8",
    strong: "#2c2580",
    even: "#c9551f",
    masked: [236, 237, 241],
    scale: { from: [0.99, 0.005, 290], to: [0.26, 0.13, 286] },
  },
  dark: {
    paper: "#14151c",
    ink: "#e7e8f0",
    faint: "#9a9fb3",
    rule: "#30323f",
    bar: "#8f88e6",
    strong: "#cfcbff",
    even: "#f0894f",
    masked: [38, 40, 50],
    scale: { from: [0.2, 0.015, 285], to: [0.95, 0.06, 300] },
  },
};
const SHADES = 256;

export function theme(name) {
  const found = THEMES[name];
  found.shades ??= shades(found.scale);
  return { name, ...found };
}

// The colour [r, g, b] of a share from 0 to 1.
export function shade({ shades: table }, share) {
  return table[Math.max(0, Math.min(SHADES - 1, Math.round(share * (SHADES - 1))))];
}

export const css = ([r, g, b]) => `rgb(${r},${g},${b})`;

// Black or white, whichever can be read on a colour.
export function readable([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#14151c" : "#ffffff";
}

// Lightness is linear; chroma rises and falls between the ends, so that the middle is the most colourful.
function shades({ from, to }) {
  return Array.from({ length: SHADES }, (_, k) => {
    const t = k / (SHADES - 1);
    const between = (a, b) => a + (b - a) * t;
    const chroma = between(from[1], to[1]) + 0.11 * Math.sin(Math.PI * t);
    return inGamut(between(from[0], to[0]), chroma, between(from[2], to[2]));
  });
}

// Return the nearest colour of less chroma that a screen has.
function inGamut(lightness, chroma, hue) {
  for (let c = chroma; c > 0; c -= 0.004) {
    const colour = oklchToLinear(lightness, c, hue);
    if (colour.every((x) => x >= -0.0005 && x <= 1.0005)) return encodeSrgb(colour);
  }
  return encodeSrgb(oklchToLinear(lightness, 0, hue));
}

// The matrices of OKLab, https://bottosson.github.io/posts/oklab/ (public domain).
function oklchToLinear(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}

function encodeSrgb(linear) {
  return linear.map((x) => {
    const clipped = Math.min(1, Math.max(0, x));
    const encoded = clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055;
    return Math.round(255 * encoded);
  });
}
