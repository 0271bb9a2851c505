// The networks of an episode, kept up to date by events.

export class Population {
  constructor(data) {
    this.slots = data.slots;
    this.episode = data.episode;
    this.networks = new Map(data.networks.map((one) => [one.environment, one]));
    const longest = Math.max(0, ...data.networks.map((one) => one.steps.length));
    this.steps = Math.max(1, Number(data.steps) || 0, longest);
    this.lanes = Math.max(
      1,
      Array.isArray(data.slots) ? data.slots.length : 0,
      ...data.networks.map((one) => one.steps[0]?.stages?.length ?? 0),
    );
  }

  /** Take an event; the network that it changed, or null. "newer" if it belongs to a newer episode. */
  take(entry) {
    const payload = entry.payload;
    if (this.episode === null || payload.episode > this.episode.number) return "newer";
    if (payload.episode !== this.episode.number) return null;
    const network = this.networks.get(payload.environment);
    if (!network) return "newer";
    if (entry.type === "step_taken") {
      if (payload.step >= this.steps) return "newer"; // it grows on longer than was known
      network.steps.push(payload);
    } else if (entry.type === "episode_ended") network.objective = payload.objective;
    else if (entry.type === "rolled_back") network.rollbacks += 1;
    return network;
  }

  families() {
    return [...new Set([...this.networks.values()].map((one) => one.family).filter((name) => name !== null))].sort();
  }

  /** Those of a family, or all, in an order. */
  chosen(family, order) {
    const networks = [...this.networks.values()].filter((one) => !family || one.family === family);
    const worth = { score: objective, accuracy: (one) => one.steps.at(-1)?.metric };
    const of = worth[order];
    if (of) networks.sort((one, other) => (of(other) ?? -Infinity) - (of(one) ?? -Infinity));
    return networks;
  }
}

/** J of a network as it stands. */
export const objective = (network) => network.objective ?? network.steps.at(-1)?.objective;
