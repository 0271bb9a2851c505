// Doing things again, but not too often.

/** A function that runs `work` soon, at most once in so many milliseconds, and never twice at a time. */
export function atMostEvery(milliseconds, work) {
  let timer = null;
  let last = -Infinity;
  let busy = false;
  let wanted = false;
  const run = async () => {
    timer = null;
    busy = true;
    last = performance.now();
    try {
      await work();
    } finally {
      busy = false;
      if (wanted) ask();
    }
  };
  const ask = () => {
    wanted = busy;
    if (busy || timer !== null) return;
    timer = setTimeout(run, Math.max(0, last + milliseconds - performance.now()));
  };
  return ask;
}
