// Asking the server.

/** Its data; an Error with one sentence if it has none. */
export async function ask(view, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of [value].flat()) {
      if (one !== null && one !== undefined) query.append(name, one);
    }
  }
  let response;
  try {
    response = await fetch(`api/${view}?${query}`);
  } catch {
    throw new Error("The dashboard server does not respond: is `esper dash` still running?");
  }
  const data = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(data.error ?? "Access denied: open the address that `esper dash` printed.");
  return data;
}
