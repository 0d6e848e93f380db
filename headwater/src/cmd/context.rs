//! `headwater login` and `headwater context`: remembers servers on other hosts, with their addresses and tokens, so
//! that this user's commands can be for them. A remembered server is a context.

use std::io::{IsTerminal, Read, Write};
use std::path::Path;

use anyhow::Context as _;
use headwater_api::{Problem, ProblemKind};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use serde_json::json;

use crate::cli::{ContextCommand, LoginArgs};
use crate::client::Client;
use crate::client::server::{self, Address, ClientFiles};
use crate::cmd::token::role_of;
use crate::cmd::web_console;
use crate::contexts::{Context, Contexts, LOCAL};
use crate::failure::{invalid, problem};
use crate::oidc;
use crate::show;

/// What follows if only this user's file changes.
const STAYS_VALID: &str = "its token or certificate stays valid until it expires or is revoked";

/// The longest token, in bytes.
const TOKEN_MAX_BYTES: u64 = 4096;

/// Logs in to a server, and makes it the current one.
pub async fn login(args: LoginArgs, json: bool) -> anyhow::Result<u8> {
    let address = Address::parse(&args.url)?;
    let name = args.name.unwrap_or_else(|| address.host.clone());
    if name.is_empty() || name == LOCAL {
        return Err(invalid(format!("'{name}' is not a name for a server: give another name with --name")));
    }
    let authorities = args.ca.as_deref().map(read_authorities).transpose()?;
    let certificate = own_files(args.certificate.as_deref().zip(args.key.as_deref()))?;
    if certificate.is_some() && !address.is_encrypted {
        let message =
            format!("cannot log in to {} with a certificate: the connection is not encrypted", address.url());
        return Err(Problem::new(ProblemKind::Invalid, message)
            .advise("use an https URL, or a token")
            .into());
    }
    let mut context = Context {
        url: address.url(),
        fingerprint: args.fingerprint,
        authorities,
        token: String::new(),
        certificate,
    };
    // Before the token is read: it is never sent to an unverified server.
    if address.is_encrypted
        && let Err(error) = server::connect(&address, &context.trust(), context.certificate.as_ref()).await
    {
        return Err(with_fingerprint(error, &address, &context).await);
    }
    if args.oidc {
        context.token = oidc::log_in(&Client::remote(&context)?, web_console::browse).await?.secret;
    } else if context.certificate.is_none() {
        context.token = token(args.token_file.as_deref(), &address)?;
    }
    let client = Client::remote(&context)?;
    let caller = client.caller().await?;
    let mut contexts = Contexts::load()?;
    if let Some(earlier) = contexts.contexts.get(&name).filter(|earlier| earlier.url == context.url)
        && earlier.token != context.token
        && let Ok(client) = Client::remote(earlier)
        && let Err(error) = client.end_login().await
    {
        show::aside(&format!("cannot end the earlier login to {name}, which ends by itself: {error:#}\n"));
    }
    contexts.contexts.insert(name.clone(), context);
    contexts.current = Some(name.clone());
    contexts.save()?;
    if json {
        show::json(
            &json!({ "name": name, "url": address.url(), "principal": caller.principal, "role": caller.role, "scopes": caller.scopes }),
        )?;
    } else {
        show::line(&format!(
            "logged in to {name} ({}) as {}, {}",
            address.url(),
            caller.principal,
            role_of(caller.role, caller.scopes.as_ref())
        ))?;
    }
    Ok(0)
}

/// Ends the login to the named server, or to the current one, and removes the server from this user's file.
pub async fn logout(named: Option<String>, json: bool) -> anyhow::Result<u8> {
    let mut contexts = Contexts::load()?;
    let name = named.filter(|name| !name.is_empty()).or_else(|| contexts.current.clone());
    let name = name.unwrap_or_else(|| LOCAL.to_owned());
    let Some(context) = contexts.choose(Some(&name))? else {
        let message = "there is no login to end: commands go to the daemon of this host";
        return Err(Problem::new(ProblemKind::Invalid, message)
            .advise("name a server with --context; 'headwater context list' shows all servers")
            .into());
    };
    let client = Client::remote(context)?;
    client.end_login().await.map_err(|error| not_ended(&error, &name))?;
    // Only the token of a login with a browser ends so.
    let is_ended = match client.caller().await {
        Ok(_) => false,
        Err(error) if problem(&error).kind == ProblemKind::Unauthorized => true,
        Err(error) => return Err(not_ended(&error, &name)),
    };
    contexts.contexts.remove(&name);
    contexts.current = contexts.current.filter(|current| *current != name);
    contexts.save()?;
    if json {
        show::json(&json!({ "name": name, "ended": is_ended }))?;
    } else if is_ended {
        show::line(&format!("logged out of {name}: its token is not valid any more"))?;
    } else {
        show::line(&format!("removed {name}; {STAYS_VALID}"))?;
    }
    Ok(0)
}

fn not_ended(error: &anyhow::Error, name: &str) -> anyhow::Error {
    let advice = format!("'headwater context remove {name}' forgets the server without asking it");
    problem(error).during(format!("cannot log out of {name}")).advise(advice).into()
}

/// The files of the user's certificate, with absolute paths, because later commands may run in other directories.
fn own_files(given: Option<(&Path, &Path)>) -> anyhow::Result<Option<ClientFiles>> {
    let Some((certificate, key)) = given else { return Ok(None) };
    let absolute = |path: &Path| {
        std::path::absolute(path).with_context(|| format!("cannot find the directory of {}", path.display()))
    };
    Ok(Some(ClientFiles { certificate: absolute(certificate)?, key: absolute(key)? }))
}

/// Adds the server's fingerprint to the error of an unknown certificate.
async fn with_fingerprint(error: anyhow::Error, address: &Address, context: &Context) -> anyhow::Error {
    let is_refused = error.downcast_ref::<Problem>().is_some_and(|it| it.kind == ProblemKind::Unauthorized);
    if !is_refused || context.fingerprint.is_some() || context.authorities.is_some() {
        return error;
    }
    let Ok(seen) = server::seen_fingerprint(address).await else { return error };
    let message = format!("the certificate of {} is not trusted; its fingerprint is {seen}", address.url());
    let advice = format!(
        "compare it with what 'headwater status' shows on the server, then: headwater login {} --fingerprint {seen}",
        address.url()
    );
    Problem::new(ProblemKind::Unauthorized, message).advise(advice).into()
}

fn read_authorities(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Reads the token from a file, standard input or the terminal.
fn token(file: Option<&Path>, address: &Address) -> anyhow::Result<String> {
    let read = match file {
        Some(path) if path == Path::new("-") => read_some(std::io::stdin()).context("cannot read the token"),
        Some(path) => std::fs::File::open(path)
            .and_then(read_some)
            .with_context(|| format!("cannot read the token of {}", path.display())),
        None if std::io::stdin().is_terminal() => {
            show::aside(&format!("token for {}: ", address.url()));
            let typed = read_unseen().context("cannot read the token");
            show::aside("\n");
            typed
        }
        None => {
            return Err(invalid(
                "give the token with --token-file FILE, or --token-file - for standard input",
            ));
        }
    }?;
    let token = read.trim().to_owned();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(invalid(
            "the given text is not a token, because it is empty or has spaces: 'headwater token create' on the server prints a \
             token",
        ));
    }
    Ok(token)
}

fn read_some(from: impl Read) -> std::io::Result<String> {
    let mut text = String::new();
    from.take(TOKEN_MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// Reads a line from the terminal without echo.
fn read_unseen() -> std::io::Result<String> {
    let stdin = std::io::stdin();
    let before = tcgetattr(&stdin)?;
    let mut unseen = before.clone();
    unseen.local_modes.remove(LocalModes::ECHO);
    tcsetattr(&stdin, OptionalActions::Flush, &unseen)?;
    let mut line = String::new();
    let read = stdin.read_line(&mut line);
    tcsetattr(&stdin, OptionalActions::Now, &before)?;
    std::io::stderr().flush()?;
    read.map(|_| line)
}

/// Runs a context command.
pub fn run(command: ContextCommand, json: bool) -> anyhow::Result<u8> {
    let mut contexts = Contexts::load()?;
    match command {
        ContextCommand::List => list(&contexts, json)?,
        ContextCommand::Use { name } => {
            contexts.choose(Some(&name))?;
            contexts.current = Some(name.clone()).filter(|name| name != LOCAL);
            contexts.save()?;
            if json {
                show::json(&json!({ "current": name }))?
            } else {
                show::line(&format!("commands go to {name}"))?
            }
        }
        ContextCommand::Remove { name } => {
            if contexts.contexts.remove(&name).is_none() {
                return Err(contexts.unknown(&name));
            }
            contexts.current = contexts.current.filter(|current| *current != name);
            contexts.save()?;
            let text = format!("removed {name}; {STAYS_VALID}");
            if json { show::removed(&[name])? } else { show::line(&text)? }
        }
    }
    Ok(0)
}

fn list(contexts: &Contexts, json: bool) -> anyhow::Result<()> {
    let current = contexts.current.as_deref().unwrap_or(LOCAL);
    if json {
        let all: Vec<_> = contexts
            .contexts
            .iter()
            .map(|(name, context)| {
                let Context { url, fingerprint, .. } = context;
                json!({ "name": name, "url": url, "fingerprint": fingerprint, "current": name == current })
            })
            .collect();
        return show::json(&json!({ "contexts": all }));
    }
    let mark = |name: &str| if name == current { "*" } else { "" }.to_owned();
    let local = [vec![mark(LOCAL), LOCAL.to_owned(), "the daemon of this host".to_owned(), "-".to_owned()]];
    let known = |context: &Context| match (&context.fingerprint, &context.authorities) {
        (Some(fingerprint), _) => fingerprint.clone(),
        (None, Some(_)) => "the authorities of --ca".to_owned(),
        (None, None) => "the system's authorities".to_owned(),
    };
    let rows = contexts
        .contexts
        .iter()
        .map(|(name, context)| vec![mark(name), name.clone(), context.url.clone(), known(context)]);
    show::table(&["", "CONTEXT", "SERVER", "KNOWN BY"], local.into_iter().chain(rows))
}
