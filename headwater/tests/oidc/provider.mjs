// A real identity provider for `headwater/tests/it/logins.rs`: the npm package oidc-provider. It prints its URL. Each line of its input
// is a command, which it answers with a line:
//
//   person SUBJECT   from now on, this person is the one that logs in
//   nobody           from now on, logins are refused
//   keys             from now on, other keys sign
//
// It ends with its input.

import { generateKeyPairSync, randomBytes } from "node:crypto";
import { createServer } from "node:http";
import { createInterface } from "node:readline";

// The first line of the output is the URL.
console.info = console.warn = console.error;
const { default: Provider } = await import("oidc-provider");

const PEOPLE = {
  4711: { preferred_username: "anna", groups: ["staff", "teachers"] },
  4712: { preferred_username: "ben", groups: ["guests"] },
  4713: { preferred_username: "cleo", groups: ["staff"] },
};
let subject = "4711";

const server = createServer();
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const issuer = `http://127.0.0.1:${server.address().port}`;

const client = (client_id) => ({
  client_id,
  application_type: "native",
  token_endpoint_auth_method: "none",
  // A native client may use any port of a loopback address (RFC 8252).
  redirect_uris: ["http://127.0.0.1/"],
});

/** A provider with new keys. */
function provider() {
  const { privateKey } = generateKeyPairSync("rsa", { modulusLength: 2048 });
  const key = { ...privateKey.export({ format: "jwk" }), kid: randomBytes(4).toString("hex"), use: "sig", alg: "RS256" };
  return new Provider(issuer, {
    clients: [client("headwater")],
    jwks: { keys: [key] },
    claims: { openid: ["sub"], profile: ["preferred_username"], email: ["email"], groups: ["groups"] },
    // The claims are in the ID token, as Keycloak and Dex do it.
    conformIdTokenClaims: false,
    findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, ...PEOPLE[id] }) }),
    features: { devInteractions: { enabled: false } },
    interactions: { url: (_, interaction) => `/interaction/${interaction.uid}` },
    cookies: { keys: [randomBytes(16).toString("hex")] },
  });
}

let current = provider();
let answer = current.callback();

server.on("request", async (request, response) => {
  if (!request.url.startsWith("/interaction/")) return answer(request, response);
  try {
    await interact(request, response);
  } catch (error) {
    response.writeHead(500).end(String(error));
  }
});

/** Logs the person in and consents, or refuses, without a page. */
async function interact(request, response) {
  const { prompt, params, session } = await current.interactionDetails(request, response);
  if (subject === null) {
    const refusal = { error: "access_denied", error_description: "not today" };
    return current.interactionFinished(request, response, refusal);
  }
  if (prompt.name === "login") {
    return current.interactionFinished(request, response, { login: { accountId: subject } });
  }
  const grant = new current.Grant({ accountId: session.accountId, clientId: params.client_id });
  grant.addOIDCScope(params.scope);
  const consent = { grantId: await grant.save() };
  return current.interactionFinished(request, response, { consent }, { mergeWithLastSubmission: true });
}

console.log(issuer);
for await (const line of createInterface({ input: process.stdin })) {
  const [command, name] = line.split(" ");
  if (command === "person") subject = name;
  else if (command === "nobody") subject = null;
  else if (command === "keys") {
    current = provider();
    answer = current.callback();
  } else throw new Error(`there is no command ${line}`);
  console.log("done");
}
process.exit(0);
