//! The command line's side of a login: it shows a link, and waits for the browser on a loopback port.

use std::time::Duration;

use anyhow::Context as _;
use headwater_api::{BeginLogin, BegunLogin, FinishLogin, NewToken, Problem, ProblemKind};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use super::{query, web};
use crate::client::Client;
use crate::show;

/// How long the person may take.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(300);

/// The longest request of a browser, in bytes.
const REQUEST_MAX_BYTES: u64 = 32 << 10;

/// The most connections at the same time.
const REQUESTS_MAX: usize = 32;

/// Timeout of a request of a browser.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

fn refused(message: impl Into<String>) -> anyhow::Error {
    Problem::new(ProblemKind::Unauthorized, message).into()
}

/// Has a person log in to the server of this client, with a browser. `open` opens a page in the browser if there is a
/// desktop.
pub async fn log_in(client: &Client, open: impl FnOnce(&str)) -> anyhow::Result<NewToken> {
    let listener = TcpListener::bind("127.0.0.1:0").await.context("cannot wait for the browser")?;
    let port = listener.local_addr().context("cannot wait for the browser")?.port();
    let redirect = format!("http://127.0.0.1:{port}/");
    let BegunLogin { url, state, secret } =
        client.begin_login(&BeginLogin { redirect: redirect.clone() }).await?;
    if !web::is_safe(&url) {
        return Err(refused("cannot log in: the server's answer is not the link of an identity provider"));
    }
    show::aside(&format!("log in with a browser on this computer: {url}\n"));
    open(&url);
    let code = tokio::time::timeout(LOGIN_TIMEOUT, code(&listener, &state)).await;
    let code = code.map_err(|_| {
        let minutes = LOGIN_TIMEOUT.as_secs() / 60;
        refused(format!("cannot log in: the browser did not come back within {minutes} minutes"))
    })??;
    client.finish_login(&FinishLogin { secret, code, redirect }).await
}

/// Waits until the browser brings the code of this login. Other requests are refused.
async fn code(listener: &TcpListener, state: &str) -> anyhow::Result<String> {
    // Browsers open connections in advance, which send nothing: they must not keep the answer waiting.
    let mut answers = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if answers.len() < REQUESTS_MAX => {
                let (stream, _) = accepted.context("cannot wait for the browser")?;
                let state = state.to_owned();
                answers.spawn(async move { tokio::time::timeout(REQUEST_TIMEOUT, answer(stream, &state)).await });
            }
            Some(answered) = answers.join_next() => {
                if let Ok(Ok(Ok(Some(outcome)))) = answered {
                    return outcome;
                }
            }
        }
    }
}

/// Answers a request. Returns `None` if it does not belong to this login.
async fn answer(mut stream: TcpStream, state: &str) -> std::io::Result<Option<anyhow::Result<String>>> {
    let (reading, mut writing) = stream.split();
    let mut lines = BufReader::new(reading.take(REQUEST_MAX_BYTES)).lines();
    let first = lines.next_line().await?.unwrap_or_default();
    while lines.next_line().await?.is_some_and(|line| !line.is_empty()) {}
    let query = first.strip_prefix("GET /?").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
    let outcome = outcome(query, state);
    let (status, text) = match &outcome {
        None => ("404 Not Found", "headwater does not wait for this login."),
        Some(Ok(_)) => ("200 OK", "Close this page, and return to the terminal."),
        Some(Err(_)) => ("200 OK", "You are not logged in. The terminal says why."),
    };
    let length = text.len();
    let head = "Content-Type: text/plain; charset=utf-8\r\nConnection: close\r\nCache-Control: no-store";
    let answer = format!("HTTP/1.1 {status}\r\n{head}\r\nContent-Length: {length}\r\n\r\n{text}");
    // The outcome counts even if the browser is gone.
    let _ = writing.write_all(answer.as_bytes()).await;
    let _ = writing.shutdown().await;
    Ok(outcome)
}

/// The code in a query of the browser, or why there is none. `None`: the query does not belong to this login.
fn outcome(text: &str, state: &str) -> Option<anyhow::Result<String>> {
    if query::field(text, "state").as_deref() != Some(state) {
        return None;
    }
    if let Some(error) = query::field(text, "error") {
        let more = query::field(text, "error_description").unwrap_or_default();
        let reason = query::plain(&format!("{error} {more}"));
        return Some(Err(refused(format!("the identity provider refuses the login: {reason}"))));
    }
    let code = query::field(text, "code").filter(|code| !code.is_empty());
    Some(code.ok_or_else(|| refused("the identity provider sent no code")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_answer_to_this_login_counts() {
        assert_eq!(outcome("code=4711&state=abc", "abc").unwrap().unwrap(), "4711");
        assert!(outcome("code=4711&state=other", "abc").is_none());
        assert!(outcome("code=4711", "abc").is_none() && outcome("", "abc").is_none());
        assert!(outcome("state=abc", "abc").unwrap().is_err());
        let refused = outcome("error=access_denied&error_description=not+you&state=abc", "abc").unwrap();
        assert!(refused.unwrap_err().to_string().contains("access_denied not you"));
    }
}
