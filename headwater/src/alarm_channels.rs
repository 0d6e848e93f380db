//! Sends alarms outside of the daemon: to a webhook, by mail, to the journal of systemd. `headwater_service` decides which alarms
//! are sent when, and repeats what failed.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use aws_lc_rs::hmac;
use clap::{Args, ValueHint};
use headwater_api::words::time;
use headwater_api::{Alarm, ProblemKind};
use headwater_service::backend::{AlarmChannel, AlarmMessage, BackendError};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Request, header};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixDatagram;

use crate::client::server::{self, Address, Trust};
use crate::failure::{invalid, one_line};

/// How long a web server may take for its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The minimum length of the key that signs requests.
const KEY_BYTES_MIN: usize = 16;

/// The maximum size of the file of `--alarm-webhook`.
const WEBHOOK_FILE_BYTES_MAX: u64 = 8 << 10;

/// Where journald takes messages.
const JOURNAL_SOCKET: &str = "/run/systemd/journal/socket";

/// Identifies alarms in the journal: `journalctl MESSAGE_ID=..`.
const MESSAGE_ID: &str = "5c1dd4bd6b6f4a3c9b7ffa1d0a2a9d3e";

/// By which channels `headwater serve` sends alarms.
#[derive(Clone, Debug, Default, Args)]
pub struct AlarmArgs {
    /// Send alarms to a web server: a file with its URL in the first line (https, or http to this host), and in the second the key that
    /// signs what is sent, of at least 16 characters
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub alarm_webhook: Option<PathBuf>,
    /// Mail alarms to this address; may be given several times
    #[arg(long, value_name = "ADDRESS", value_parser = mail_address)]
    pub alarm_mail: Vec<String>,
    /// The program that sends mail: it is called as sendmail, with the message on its standard input
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, default_value = "/usr/sbin/sendmail")]
    pub alarm_sendmail: PathBuf,
    /// Write alarms to the journal of systemd, as structured entries (HEADWATER_ALARM, HEADWATER_SUBJECT, ..)
    #[arg(long)]
    pub alarm_journal: bool,
}

impl AlarmArgs {
    /// The channels. A setting that cannot work is refused here, before the daemon starts.
    pub fn channels(&self) -> anyhow::Result<Vec<Arc<dyn AlarmChannel>>> {
        let mut channels: Vec<Arc<dyn AlarmChannel>> = Vec::new();
        if let Some(path) = &self.alarm_webhook {
            channels.push(Arc::new(Webhook::read(path)?));
        }
        if !self.alarm_mail.is_empty() {
            channels.push(Arc::new(Mail::new(&self.alarm_sendmail, &self.alarm_mail)?));
        }
        if self.alarm_journal {
            channels.push(Arc::new(Journal(PathBuf::from(JOURNAL_SOCKET))));
        }
        Ok(channels)
    }
}

fn mail_address(text: &str) -> Result<String, String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_graphic() && !b",;:<>()[]\"\\".contains(&byte));
    if is_plain && !text.starts_with('-') && !text.is_empty() {
        return Ok(text.to_owned());
    }
    Err("it is not an address such as admin@example.com, or the name of a user".to_owned())
}

fn failed(what: &str, error: &anyhow::Error) -> BackendError {
    BackendError::new(ProblemKind::Failed, format!("{what}: {}", one_line(error)))
}

/// The webhook of `--alarm-webhook`. Its URL may contain a secret, so messages name only its host.
struct Webhook {
    address: Address,
    path: String,
    key: hmac::Key,
}

impl Webhook {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let failed = || format!("cannot read {} of --alarm-webhook", path.display());
        let found = path.metadata().with_context(failed)?;
        if std::os::unix::fs::MetadataExt::mode(&found) & 0o007 != 0 {
            let path = path.display();
            return Err(invalid(format!(
                "{}: other users can read or write it: run 'chmod o= {path}'",
                failed()
            )));
        }
        let len = found.len();
        if len > WEBHOOK_FILE_BYTES_MAX {
            return Err(invalid(format!(
                "{}: it has {len} bytes, and at most {WEBHOOK_FILE_BYTES_MAX} are allowed: give a file with two lines, the URL and the key",
                failed()
            )));
        }
        let text = std::fs::read_to_string(path).with_context(failed)?;
        Self::parse(&text)
            .map_err(|why| invalid(format!("the file {} of --alarm-webhook {why}", path.display())))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let (Some(url), Some(key), None) = (lines.next(), lines.next(), lines.next()) else {
            return Err("does not have two lines: a URL, and the key that signs".to_owned());
        };
        if key.len() < KEY_BYTES_MIN {
            return Err(format!("has a key of fewer than {KEY_BYTES_MIN} characters"));
        }
        let odd = "does not begin with a URL such as https://example.com/alarms".to_owned();
        let uri: hyper::Uri = url.parse().map_err(|_| odd.clone())?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(odd) };
        let port = authority.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        let root = format!("{scheme}://{}:{port}", authority.host());
        let is_plain = scheme == "http" && !authority.as_str().contains('@');
        let address = Address::parse(&root).map_err(|_| match is_plain {
            true => "has an http URL of another host, so others could read the alarms on the way: use https"
                .to_owned(),
            false => odd,
        })?;
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        Ok(Self { address, path, key: hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()) })
    }

    /// The header that proves who sent a body, and when.
    fn signature(&self, at_s: u64, body: &[u8]) -> String {
        let mac = hmac::sign(&self.key, &[format!("{at_s}.").as_bytes(), body].concat());
        let digits: String = mac.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("t={at_s},v1={digits}")
    }

    async fn post(&self, news: &AlarmMessage) -> anyhow::Result<()> {
        let body = serde_json::to_vec(&json!({
            "host": news.host,
            "at_ms": news.at_ms,
            "title": news.title(),
            "began": news.began,
            "over": news.over,
            "standing": news.standing,
        }))?;
        let request = Request::post(&self.path)
            .header(header::HOST, self.address.authority())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::USER_AGENT, concat!("headwater/", env!("CARGO_PKG_VERSION")))
            .header("headwater-signature", self.signature(news.at_ms / 1000, &body))
            .body(Full::new(Bytes::from(body)))?;
        if self.address.is_encrypted {
            let stream = server::connect(&self.address, &Trust::Authorities(None), None).await?;
            exchange(stream, request).await
        } else {
            exchange(server::connect_plain(&self.address).await?, request).await
        }
    }
}

/// Sends a request, and takes an answer with a status of 200 to 299 for a success.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> anyhow::Result<()> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, sender.send_request(request)).await;
    connection.abort();
    let answer = answer.with_context(|| format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()))??;
    anyhow::ensure!(answer.status().is_success(), "it answers {}", answer.status());
    Ok(())
}

#[async_trait]
impl AlarmChannel for Webhook {
    fn name(&self) -> &'static str {
        "webhook"
    }

    async fn send(&self, news: &AlarmMessage) -> Result<(), BackendError> {
        let what = format!("the web server {} did not accept the alarms", self.address.host);
        self.post(news).await.map_err(|error| failed(&what, &error))
    }
}

/// A program that sends mail.
struct Mail {
    program: PathBuf,
    to: Vec<String>,
}

impl Mail {
    fn new(program: &Path, to: &[String]) -> anyhow::Result<Self> {
        if !program.is_file() {
            return Err(invalid(format!(
                "there is no program {} to send mail with: install one, or name it with --alarm-sendmail",
                program.display()
            )));
        }
        Ok(Self { program: program.to_owned(), to: to.to_vec() })
    }

    fn message(&self, news: &AlarmMessage) -> String {
        // Subjects of alarms have names of machines and images only; messages may have anything in them.
        let title: String = news.title().chars().filter(|c| c.is_ascii_graphic() || *c == ' ').collect();
        let mut text = format!(
            "To: {}\nSubject: [Headwater] {title}\nAuto-Submitted: auto-generated\nMIME-Version: 1.0\n\
             Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: 8bit\n",
            self.to.join(", ")
        );
        for (what, alarms) in [("Began", &news.began), ("Over", &news.over)] {
            if !alarms.is_empty() {
                text.push_str(&format!("\n{what}:\n"));
            }
            for alarm in alarms {
                text.push_str(&in_mail(alarm));
            }
        }
        text.push_str(&format!("\nAlarms now: {}. 'headwater status' shows them.\n", news.standing));
        text
    }

    async fn deliver(&self, message: &str) -> anyhow::Result<()> {
        let mut command = tokio::process::Command::new(&self.program);
        command.args(["-i", "-t"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().context("it cannot be started")?;
        if let Some(mut input) = child.stdin.take() {
            // A program that ends early says why by its exit code.
            let _ = input.write_all(message.as_bytes()).await;
        }
        let output = child.wait_with_output().await?;
        let said: String = String::from_utf8_lossy(&output.stderr).trim().chars().take(300).collect();
        anyhow::ensure!(output.status.success(), "{}: {said}", output.status);
        Ok(())
    }
}

fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn in_mail(alarm: &Alarm) -> String {
    let (subject, since) = (plain(&alarm.subject), time(alarm.since_ms));
    format!("  {subject}, since {since}\n    {}\n    {}\n", plain(&alarm.message), plain(&alarm.advice))
}

#[async_trait]
impl AlarmChannel for Mail {
    fn name(&self) -> &'static str {
        "mail"
    }

    async fn send(&self, news: &AlarmMessage) -> Result<(), BackendError> {
        let what = format!("{} did not send the mail", self.program.display());
        self.deliver(&self.message(news)).await.map_err(|error| failed(&what, &error))
    }
}

/// The socket of journald.
struct Journal(PathBuf);

/// A message in the journal's own format: a text may have line ends, so each field is preceded by its length.
fn journal_entry(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut entry = Vec::new();
    for (name, value) in fields {
        entry.extend_from_slice(name.as_bytes());
        entry.push(b'\n');
        entry.extend_from_slice(&u64::try_from(value.len()).unwrap_or(u64::MAX).to_le_bytes());
        entry.extend_from_slice(value.as_bytes());
        entry.push(b'\n');
    }
    entry
}

#[async_trait]
impl AlarmChannel for Journal {
    fn name(&self) -> &'static str {
        "journal"
    }

    async fn send(&self, news: &AlarmMessage) -> Result<(), BackendError> {
        let failed = |error| {
            let what = format!("the journal at {} does not accept the alarms", self.0.display());
            BackendError::from_io(what, error)
        };
        let socket = UnixDatagram::unbound().map_err(failed)?;
        socket.connect(&self.0).map_err(failed)?;
        // Critical while it stands, a notice when it is over.
        for (alarms, priority, event) in [(&news.began, "2", "began"), (&news.over, "5", "over")] {
            for alarm in alarms {
                let message = format!("alarm {event}: {}: {alarm}", alarm.subject);
                let since = alarm.since_ms.to_string();
                let entry = journal_entry(&[
                    ("MESSAGE", message.as_str()),
                    ("MESSAGE_ID", MESSAGE_ID),
                    ("PRIORITY", priority),
                    ("SYSLOG_IDENTIFIER", "headwater"),
                    ("HEADWATER_ALARM", event),
                    ("HEADWATER_SUBJECT", alarm.subject.as_str()),
                    ("HEADWATER_SINCE_MS", since.as_str()),
                    ("HEADWATER_ADVICE", alarm.advice.as_str()),
                ]);
                socket.send(&entry).await.map_err(failed)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;

    fn news() -> AlarmMessage {
        let alarm = |subject: &str, message: &str| Alarm {
            subject: subject.to_owned(),
            since_ms: 1_700_000_000_000,
            message: message.to_owned(),
            advice: "give it more".to_owned(),
        };
        AlarmMessage {
            host: "lab1".to_owned(),
            at_ms: 1_700_000_060_000,
            began: vec![alarm("machine desk-1", "full\nSubject: forged")],
            over: vec![alarm("store", "it does not answer")],
            standing: 1,
        }
    }

    /// Answers one request with this status, and returns its head and its body.
    async fn answer_one(listener: TcpListener, status: &str) -> (String, Vec<u8>) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut seen = Vec::new();
        loop {
            let mut piece = [0; 4096];
            let n = stream.read(&mut piece).await.unwrap();
            seen.extend_from_slice(&piece[..n]);
            let text = String::from_utf8_lossy(&seen).into_owned();
            let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            if body.len() >= length.unwrap().parse::<usize>().unwrap() {
                stream
                    .write_all(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").as_bytes())
                    .await
                    .unwrap();
                return (head.to_owned(), body.as_bytes().to_vec());
            }
        }
    }

    #[tokio::test]
    async fn a_web_server_gets_signed_news_and_may_refuse_them() {
        for (status, is_taken) in [("204 No Content", true), ("500 Internal Server Error", false)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let file = format!("http://127.0.0.1:{port}/hooks/T0K3N?a=b\n0123456789abcdef\n");
            let webhook = Webhook::parse(&file).unwrap();
            let (sent, (head, body)) =
                tokio::join!(async { webhook.send(&news()).await }, answer_one(listener, status));
            assert_eq!(sent.is_ok(), is_taken, "{sent:?}");
            // No message has the path, which may be a secret.
            assert!(!sent.err().is_some_and(|error| error.to_string().contains("T0K3N")));
            assert!(head.starts_with("POST /hooks/T0K3N?a=b HTTP/1.1\r\n"), "{head}");
            let parsed: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(parsed["began"][0]["subject"], "machine desk-1");
            assert_eq!(parsed["title"], "lab1: machine desk-1 has an alarm, store is well again");
            // Another implementation checks the signature.
            let signature = head.lines().find_map(|line| line.strip_prefix("headwater-signature: ")).unwrap();
            let (at, digits) = signature.strip_prefix("t=").unwrap().split_once(",v1=").unwrap();
            let signed = [format!("{at}.").as_bytes(), &body].concat();
            assert_eq!((at, digits), ("1700000060", &*openssl_hmac("0123456789abcdef", &signed)));
        }
    }

    fn openssl_hmac(key: &str, bytes: &[u8]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("signed");
        std::fs::write(&file, bytes).unwrap();
        let mut openssl = std::process::Command::new("openssl");
        let output = openssl.args(["dgst", "-sha256", "-hmac", key, "-r"]).arg(&file).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.split_whitespace().next().unwrap_or_default().to_owned()
    }

    #[test]
    fn files_of_web_servers_that_cannot_work_are_refused() {
        for (file, why) in [
            ("", "two lines"),
            ("https://example.com/a\n", "two lines"),
            ("https://example.com/a\n0123456789abcdef\nmore\n", "two lines"),
            ("https://example.com/a\nshort\n", "16 characters"),
            ("http://example.com/a\n0123456789abcdef\n", "use https"),
            ("example.com\n0123456789abcdef\n", "a URL"),
        ] {
            let refused = Webhook::parse(file).err().unwrap();
            assert!(refused.contains(why), "{file:?}: {refused}");
        }
        let port = |url: &str| Webhook::parse(&format!("{url}\n0123456789abcdef")).unwrap().address.port;
        assert_eq!(
            (port("https://example.com/a"), port("http://localhost/"), port("https://a:8443")),
            (443, 80, 8443)
        );
    }

    /// Sends by a program that was just written: between its fork and its program, a child of another test has it open.
    async fn send(mail: &Mail) -> Result<(), String> {
        loop {
            match AlarmChannel::send(mail, &news()).await.map_err(|error| error.to_string()) {
                Err(why) if why.contains("busy") => tokio::task::yield_now().await,
                sent => return sent,
            }
        }
    }

    #[tokio::test]
    async fn mail_goes_through_the_program_and_its_failure_is_sent() {
        let dir = tempfile::tempdir().unwrap();
        let (program, sent) = (dir.path().join("sendmail"), dir.path().join("sent"));
        let script = |end: &str| {
            std::fs::write(
                &program,
                format!("#!/bin/sh\necho \"$@\" >'{0}'\ncat >>'{0}'\n{end}\n", sent.display()),
            )
            .unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        script("");
        let mail = Mail::new(&program, &["admin@example.com".to_owned(), "root".to_owned()]).unwrap();
        send(&mail).await.unwrap();
        let text = std::fs::read_to_string(&sent).unwrap();
        let (head, body) = text.split_once("\n\n").unwrap();
        assert!(
            head.starts_with("-i -t\nTo: admin@example.com, root\nSubject: [Headwater] lab1: machine desk-1"),
            "{head}"
        );
        // A message cannot add a header, or a line that looks like ours.
        assert_eq!(head.matches("Subject:").count(), 1, "{head}");
        assert!(body.contains("\n    full Subject: forged\n    give it more\n"), "{body}");
        script("echo 'no route to host' >&2; exit 75");
        let failed = send(&mail).await.unwrap_err();
        assert!(failed.contains("exit status: 75: no route to host"), "{failed}");
        assert!(Mail::new(&dir.path().join("none"), &["root".to_owned()]).is_err());
        for odd in ["", "-oQ/tmp", "a b", "a,b", "a\nb"] {
            assert!(mail_address(odd).is_err(), "{odd:?}");
        }
    }

    #[tokio::test]
    async fn the_journal_gets_an_entry_for_each_alarm() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let journald = UnixDatagram::bind(&path).unwrap();
        Journal(path).send(&news()).await.unwrap();
        let mut entries = Vec::new();
        for _ in 0..2 {
            let mut entry = vec![0; 4096];
            let n = journald.recv(&mut entry).await.unwrap();
            entries.push(fields(&entry[..n]));
        }
        let field = |entry: usize, name: &str| {
            entries[entry].iter().find(|(found, _)| found == name).unwrap().1.clone()
        };
        assert_eq!(field(0, "MESSAGE"), "alarm began: machine desk-1: full\nSubject: forged; give it more");
        assert_eq!((field(0, "PRIORITY"), field(1, "PRIORITY")), ("2".to_owned(), "5".to_owned()));
        assert_eq!(
            (field(1, "HEADWATER_SUBJECT"), field(1, "HEADWATER_ALARM")),
            ("store".to_owned(), "over".to_owned())
        );
    }

    /// The fields of an entry, as the documentation of the journal's protocol has them.
    fn fields(mut entry: &[u8]) -> Vec<(String, String)> {
        let mut fields = Vec::new();
        while !entry.is_empty() {
            let end = entry.iter().position(|byte| *byte == b'\n').unwrap();
            let name = String::from_utf8(entry[..end].to_vec()).unwrap();
            let len = u64::from_le_bytes(entry[end + 1..end + 9].try_into().unwrap()) as usize;
            let value = String::from_utf8(entry[end + 9..end + 9 + len].to_vec()).unwrap();
            assert_eq!(entry[end + 9 + len], b'\n');
            entry = &entry[end + 10 + len..];
            fields.push((name, value));
        }
        fields
    }
}
