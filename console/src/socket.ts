// A WebSocket to the serial console or the display of a machine.

/** The code with which the daemon closes a socket that it refuses. */
const REFUSED = 4000;

export function openSocket(of: "console" | "display", ticket: string): WebSocket {
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  // A page cannot give a WebSocket a header, so the ticket is one of its protocols.
  return new WebSocket(`${scheme}://${location.host}/${of}`, [`headwater-${of}`, ticket]);
}

/** Why a socket was closed, as a sentence. */
export function whyClosed({ code, reason }: { code: number; reason: string }, wasOpen: boolean, of: "console" | "display"): string {
  if (code === REFUSED) return `${reason}.`;
  return wasOpen ? `The ${of} was closed: the machine is off, or the daemon ended.` : "The daemon does not answer.";
}
