// Numbers for people.

const nothing = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value == null ? nothing : whole.format(value);
}

/** Three significant digits and k, M or G. */
export function compact(value) {
  if (value == null) return nothing;
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return `${Number(value.toPrecision(3))}`;
}

export function bytes(value) {
  const gib = value / 2 ** 30;
  return gib >= 1 ? `${Number(gib.toPrecision(3))} GiB` : `${Math.round(gib * 1024)} MiB`;
}

export function seconds(value) {
  if (value == null) return nothing;
  if (value < 0.0995) return `${Number((value * 1e3).toPrecision(2))} ms`;
  if (value < 0.9995) return `${Math.round(value * 1e3)} ms`;
  if (value < 100) return `${Number(value.toPrecision(3))} s`;
  return age(value);
}

/** A span of time, coarsely. */
export function age(value) {
  if (value == null) return nothing;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 100) return `${Math.round(value)} s`;
  if (value < 6000) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

export function share(value) {
  return value == null || Number.isNaN(value) ? nothing : `${Math.round(value * 100)} %`;
}

export function rate(value) {
  return value == null ? nothing : compact(value >= 10 ? Math.round(value) : value);
}
