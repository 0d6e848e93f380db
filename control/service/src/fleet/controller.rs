//! The controller's side of the connections to nodes: a node joins with a token, and connects with its certificate. When the connection
//! ends, the time is recorded; if the node does not connect again within [`LOST_AFTER`], its host is recorded as lost.
//! `headwater/src/fleet` accepts the TCP connections and calls `Service::serve_node` for each.
//!
//! What the controller then does with a connected node is in `follow.rs` (its machines) and `loss.rs` (its lease).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use headwater_api::{HostState, Problem, ProblemKind, name, words};
use headwater_db::{DbError, HostRecord};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::fleet::follow::BEFORE_FIRST;
use crate::fleet::link::{CONNECTION_WINDOW_BYTES, Link, Lists, STREAM_WINDOW_BYTES};
use crate::fleet::node::old_copy;
use crate::fleet::protocol::{
    FromNode, Hello, JOIN_PREFIX, Join, ToNode, check_protocol, read_line, write_line,
};
use crate::fleet::{BEAT, BEAT_TIMEOUT, LOST_AFTER, RETRY_PAUSE};
use crate::token;

/// The most characters of a refusal in the log.
const REFUSAL_CHARS: usize = 300;

/// A larger difference between the clocks of node and controller is logged.
const CLOCKS_DIFFER_MS: u64 = 60_000;

/// How long the daemon waits for answers of nodes when it stops.
const ANSWERS_GRACE: Duration = Duration::from_secs(40);

/// How often the daemon checks whether requests to nodes are still in progress when it stops.
const UNUSED_LOOK: Duration = Duration::from_millis(100);

/// The node at the other end of a connection, as TLS identified it.
#[derive(Clone, Debug)]
pub struct NodePeer {
    /// The fingerprint of the node's certificate, which the fleet's authority has signed.
    pub fingerprint: Option<String>,
    /// The node's address.
    pub address: String,
}

/// A certificate that was issued to a node.
#[derive(Clone, Debug)]
pub struct Issued {
    /// In PEM.
    pub certificate: String,
    /// Its fingerprint.
    pub fingerprint: String,
}

/// The certificate authority of a fleet, which issues the certificates of nodes. `headwater/src/fleet` implements it.
pub trait Authority: Send + Sync + 'static {
    /// The URL at which nodes reach the controller.
    fn url(&self) -> String;

    /// The SHA-256 of the authority's certificate, in hexadecimal digits.
    fn fingerprint(&self) -> String;

    /// The authority's certificate, in PEM.
    fn certificate(&self) -> String;

    /// Issues the certificate of a node. `public_key` is in hexadecimal digits.
    fn issue(&self, host: &str, public_key: &str) -> Result<Issued, String>;
}

/// How often the controller checks whether the awaited nodes are connected.
const LINK_INTERVAL: Duration = Duration::from_millis(200);

fn refused(kind: ProblemKind, message: impl Into<String>) -> Problem {
    Problem::new(kind, message)
}

impl Service {
    /// Accepts nodes from now on: `authority` signs their certificates.
    pub fn accept_nodes(&self, authority: Arc<dyn Authority>) {
        // There is one port for nodes, so this is called once.
        let _ = self.fleet().authority.set(authority);
    }

    pub(crate) fn authority(&self) -> Option<&Arc<dyn Authority>> {
        self.fleet().authority.get()
    }

    /// Serves the connection of a node until it ends. After the handshake the controller is the HTTP/2 client and the node
    /// is the server, although the node opened the TCP connection.
    pub async fn serve_node<S>(&self, mut stream: S, peer: NodePeer, stop: watch::Receiver<bool>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let address = peer.address.clone();
        let first = match write_line(&mut stream, &ToNode::Ready).await {
            Ok(()) => read_line(&mut stream, "the node").await,
            Err(problem) => Err(problem),
        };
        let outcome = match first {
            Ok(FromNode::Join(join)) => match self.join(join, &peer).await {
                Ok(answer) => write_line(&mut stream, &answer).await,
                Err(problem) => Err(problem),
            },
            Ok(FromNode::Hello(hello)) => match self.admit(hello, &peer).await {
                Ok(admitted) => return self.serve_admitted(stream, admitted, stop).await,
                Err(problem) => Err(problem),
            },
            Err(problem) => Err(problem),
        };
        if let Err(problem) = outcome {
            // Unauthenticated clients get here too, so their text is cut.
            let why: String = problem.to_string().chars().take(REFUSAL_CHARS).collect();
            tracing::warn!(address, "a node is refused: {why}");
            // The node may be gone.
            let _ = write_line(&mut stream, &ToNode::Refused(problem)).await;
        }
    }

    async fn join(&self, join: Join, peer: &NodePeer) -> Result<ToNode, Problem> {
        check_protocol(join.protocol)?;
        let Some(authority) = self.authority() else {
            return Err(refused(ProblemKind::Unavailable, "this daemon accepts no nodes"));
        };
        let during = |problem: Problem| problem.during(format!("host '{}' cannot join", join.name));
        name::check_label("host", &join.name).map_err(during)?;
        let (handle, peer, added, signing) = (self.clone(), peer.clone(), join.clone(), authority.clone());
        let added = self.to_the_end(async move { handle.add_host(added, &peer, &*signing).await });
        let certificate = added.await.map_err(during)?;
        Ok(ToNode::Joined { certificate, authority: authority.certificate() })
    }

    /// Adds a host that has a valid token, and returns its certificate.
    async fn add_host(
        &self,
        join: Join,
        peer: &NodePeer,
        authority: &dyn Authority,
    ) -> Result<String, Problem> {
        let failed = |error: DbError| problem(&error);
        let again = "'headwater node token' on the controller makes another one";
        let hash = token::hash_of(&join.secret);
        let mut repo = self.db().write().await.map_err(failed)?;
        let token = repo.hosts().token(&hash).await.map_err(failed)?;
        let Some(token) = token else {
            return Err(refused(ProblemKind::Unauthorized, "there is no such join token").advise(again));
        };
        if let Some(host) = token.used_by {
            let message = format!("host '{host}' has joined with this token, and a token is for one host");
            return Err(refused(ProblemKind::Unauthorized, message).advise(again));
        }
        if token.expires_at_ms <= self.now_ms() {
            let message = format!("the join token ended at {}", words::time(token.expires_at_ms));
            return Err(refused(ProblemKind::Unauthorized, message).advise(again));
        }
        let known = repo.hosts().list().await.map_err(failed)?;
        if known.iter().any(|host| host.name == join.name) {
            let message = format!("there is a host '{}' already", join.name);
            return Err(refused(ProblemKind::Conflict, message).advise(
                "choose another name with --name, or remove that host first: 'headwater node remove'",
            ));
        }
        if let Some(same) = known.iter().find(|host| host.id == join.host) {
            let message = format!("its data directory is that of host '{}', or a copy of it", same.name);
            return Err(refused(ProblemKind::Conflict, message).advise(format!(
                "if it is that host, remove it first ('headwater node remove {}'); if it is a copy, remove 'daemon.id' in the copy",
                same.name
            )));
        }
        let issued = authority.issue(&join.name, &join.public_key);
        let issued = issued.map_err(|why| refused(ProblemKind::Invalid, why))?;
        let record = HostRecord {
            id: join.host,
            name: join.name.clone(),
            fingerprint: Some(issued.fingerprint),
            state: HostState::Joined,
            cordoned: false,
            memory_bytes: join.memory_bytes,
            cpus: join.cpus,
            generation: 0,
            seen_event: BEFORE_FIRST,
            lease_ms: 0,
            joined_at_ms: self.now_ms(),
            seen_at_ms: None,
        };
        repo.hosts().add(&record).await.map_err(failed)?;
        repo.hosts().use_token(&hash, &join.name).await.map_err(failed)?;
        let caller = Caller::admin(token.created_by);
        let detail = format!("from {}, with a token of {}", peer.address, caller.principal);
        let event = self.event(&caller, format!("host {}", join.name), "joined", detail);
        repo.events().append(event).await.map_err(failed)?;
        repo.save().await.map_err(failed)?;
        tracing::info!(host = join.name, address = peer.address, "a host has joined");
        Ok(issued.certificate)
    }

    /// Admits the connection of a node, or says why not. The host counts as connected from then on.
    async fn admit(&self, hello: Hello, peer: &NodePeer) -> Result<Admitted, Problem> {
        check_protocol(hello.protocol)?;
        let Some(fingerprint) = &peer.fingerprint else {
            return Err(refused(ProblemKind::Unauthorized, "the node has shown no certificate")
                .advise("let it join first: 'headwater node join'"));
        };
        let failed = |error: DbError| problem(&error);
        let hosts = self.db().read().await.map_err(failed)?.hosts().list().await.map_err(failed)?;
        let found = hosts.into_iter().find(|host| host.fingerprint.as_ref() == Some(fingerprint));
        let Some(record) = found else {
            let message = "the host of this certificate was removed from the fleet";
            return Err(refused(ProblemKind::Unauthorized, message).advise(
                "to let it join again, remove the directory 'node' of its data directory, and join with a new token",
            ));
        };
        if record.id != hello.host {
            let message = format!(
                "the certificate is that of host '{}', and the data directory is another one",
                record.name
            );
            return Err(refused(ProblemKind::Unauthorized, message)
                .advise("each host joins with a token of its own: 'headwater node join'"));
        }
        let slot = self.take_connection_slot(&record, &peer.address)?;
        if hello.generation > record.generation {
            return Err(old_copy(record.generation, hello.generation));
        }
        let mut repo = self.db().write().await.map_err(failed)?;
        let known = repo.hosts().by_id(record.id).await.map_err(failed)?;
        let Some(mut record) = known else {
            return Err(refused(ProblemKind::Unauthorized, "the host was removed from the fleet just now"));
        };
        let now_ms = self.now_ms();
        record.generation = record.generation.saturating_add(1);
        (record.memory_bytes, record.cpus) = (hello.memory_bytes, hello.cpus);
        (record.state, record.seen_at_ms) = (HostState::Up, Some(now_ms));
        self.begins_lease(&mut record);
        repo.hosts().update(&record).await.map_err(failed)?;
        let detail = format!("from {}, release {}", peer.address, hello.release);
        let event = self.event(&Caller::daemon(), format!("host {}", record.name), "connected", detail);
        repo.events().append(event).await.map_err(failed)?;
        repo.save().await.map_err(failed)?;
        let ahead = i128::from(hello.now_ms) - i128::from(now_ms);
        let clock_ahead_ms = i64::try_from(ahead).unwrap_or(i64::MAX);
        if clock_ahead_ms.unsigned_abs() > CLOCKS_DIFFER_MS {
            tracing::warn!(
                host = record.name,
                clock_ahead_ms,
                "the clocks of a node and of this host differ: set both with a time service"
            );
        }
        Ok(Admitted { record, address: peer.address.clone(), release: hello.release, clock_ahead_ms, slot })
    }

    /// Reserves the connection of a host; each host has at most one.
    fn take_connection_slot(&self, record: &HostRecord, address: &str) -> Result<ConnectionSlot, Problem> {
        let mut connected = self.fleet().connecting();
        if let Some(other) = connected.get(&record.id) {
            let message = format!("a node of host '{}' is connected already, from {other}", record.name);
            return Err(refused(ProblemKind::Conflict, message).advise(
                "one data directory is for one host: let the copy join with another 'daemon.id' and a token of its own",
            ));
        }
        connected.insert(record.id, address.to_owned());
        Ok(ConnectionSlot { service: self.clone(), host: record.id })
    }

    async fn serve_admitted<S>(&self, mut stream: S, admitted: Admitted, mut stop: watch::Receiver<bool>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Admitted { record, address, release, clock_ahead_ms, slot } = admitted;
        let (host, name, generation) = (record.id, record.name, record.generation);
        let welcome = ToNode::Welcome { generation, name: name.clone() };
        let turned = async {
            write_line(&mut stream, &welcome).await?;
            hyper::client::conn::http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .keep_alive_interval(BEAT)
                .keep_alive_timeout(BEAT_TIMEOUT)
                .keep_alive_while_idle(true)
                .initial_stream_window_size(STREAM_WINDOW_BYTES)
                .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
                .handshake(TokioIo::new(stream))
                .await
                .map_err(|error| refused(ProblemKind::Unavailable, error.to_string()))
        };
        // If the connection ended because of silence, that silence counts towards `LOST_AFTER`.
        let mut silent = Duration::ZERO;
        let why = match turned.await {
            Err(problem) => problem.to_string(),
            Ok((sender, connection)) => {
                let (changed, ending, lists) = (Notify::new(), Notify::new(), Lists::default());
                let link = Arc::new(Link {
                    host,
                    name: name.clone(),
                    generation,
                    address,
                    release,
                    clock_ahead_ms,
                    sender,
                    changed,
                    is_cleared: AtomicBool::default(),
                    ending,
                    lists,
                });
                self.fleet().links().insert(host, link.clone());
                tracing::info!(host = name, generation, "a node is connected");
                tokio::select! {
                    ended = connection => match ended {
                        Ok(()) => "the node has closed the connection".to_owned(),
                        Err(error) => {
                            if error.is_timeout() {
                                silent = BEAT + BEAT_TIMEOUT;
                            }
                            with_causes(&error)
                        }
                    },
                    () = self.follow_node(&link) => "the host was removed".to_owned(),
                    () = self.keep_lease(&link) => "the host was lost".to_owned(),
                    () = link.ending.notified() => "the host was removed, or lost".to_owned(),
                    () = unused_after(&mut stop, &link) => "the controller ends".to_owned(),
                }
            }
        };
        self.fleet().links().remove(&host);
        if let Err(error) = self.node_seen(host).await {
            tracing::warn!(host = name, "cannot record when a node was connected last: {}", problem(&error));
        }
        drop(slot);
        tracing::warn!(host = name, "a node is not connected any more: {why}");
        let service = self.clone();
        // The host is recorded as lost only if it stays away for a while.
        let left = LOST_AFTER.saturating_sub(silent);
        tokio::spawn(async move { service.lost_unless_back(host, generation, left, why).await });
    }

    /// Records that a host is lost, unless its node reconnects in time. `generation` is the number of its last connection: each
    /// connection of a host gets a number that is one higher.
    async fn lost_unless_back(&self, host: Uuid, generation: u64, left: Duration, why: String) {
        tokio::time::sleep(left).await;
        while !self.is_stopping() && !self.fleet().connecting().contains_key(&host) {
            match self.note_lost(host, generation, &why).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(%host, "cannot record that a host is lost; trying again: {}", problem(&error));
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    async fn note_lost(&self, host: Uuid, generation: u64, why: &str) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        let Some(mut record) = repo.hosts().by_id(host).await? else { return Ok(()) };
        // If the host has connected again since, the end of that connection makes its own call.
        if record.state == HostState::Lost
            || record.generation != generation
            || self.fleet().connecting().contains_key(&host)
        {
            return Ok(());
        }
        record.state = HostState::Lost;
        repo.hosts().update(&record).await?;
        let event = self.event(&Caller::daemon(), format!("host {}", record.name), "lost", why);
        repo.events().append(event).await?;
        repo.save().await
    }

    /// Waits until each node that was connected before the controller's restart is connected again, or its host is lost.
    pub(crate) async fn wait_until_nodes_are_back(&self) {
        loop {
            let hosts = async { self.db().read().await?.hosts().list().await };
            match hosts.await {
                Ok(hosts) => {
                    let is_awaited = |host: &HostRecord| {
                        host.fingerprint.is_some()
                            && host.state == HostState::Up
                            && self.link(host.id).is_none()
                    };
                    if !hosts.iter().any(is_awaited) {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        "cannot determine which nodes have not connected yet; trying again: {}",
                        problem(&error)
                    )
                }
            }
            if self.is_stopping() {
                return;
            }
            tokio::time::sleep(LINK_INTERVAL).await;
        }
    }

    /// After a start of the controller, watches for hosts that do not reconnect.
    pub(crate) async fn watch_for_missing_nodes(&self) -> Result<(), DbError> {
        let hosts = self.db().read().await?.hosts().list().await?;
        let nodes =
            hosts.into_iter().filter(|host| host.fingerprint.is_some() && host.state == HostState::Up);
        for host in nodes {
            let service = self.clone();
            let why = "its node has not connected since the controller started".to_owned();
            tokio::spawn(async move {
                service.lost_unless_back(host.id, host.generation, LOST_AFTER, why).await;
            });
        }
        Ok(())
    }

    /// Records the present time as when this host's node was last connected.
    pub(crate) async fn node_seen(&self, host: Uuid) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        let Some(mut record) = repo.hosts().by_id(host).await? else { return Ok(()) };
        record.seen_at_ms = Some(self.now_ms());
        // A lost host becomes `up` when its node is admitted.
        if record.state != HostState::Lost {
            record.state = HostState::Up;
        }
        repo.hosts().update(&record).await?;
        repo.save().await
    }
}

/// A node that was admitted.
struct Admitted {
    record: HostRecord,
    address: String,
    release: String,
    clock_ahead_ms: i64,
    slot: ConnectionSlot,
}

/// The reservation of a host's only connection. Dropping it releases the reservation.
struct ConnectionSlot {
    service: Service,
    host: Uuid,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.service.fleet().connecting().remove(&self.host);
    }
}

/// The text of an error with its causes.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

/// The token with which a node joins: a secret, and the fingerprint of the controller's authority.
pub struct ParsedJoinToken {
    /// The secret.
    pub secret: String,
    /// The SHA-256 of the authority's certificate, in hexadecimal digits.
    pub authority: String,
}

impl ParsedJoinToken {
    /// Parses the output of [`ParsedJoinToken::text`].
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let odd = || {
            refused(ProblemKind::Invalid, "that is not a join token")
                .advise("'headwater node token' on the controller prints one; it begins with hwj_")
        };
        let rest = text.trim().strip_prefix(JOIN_PREFIX).ok_or_else(odd)?;
        let (secret, authority) = rest.split_once('_').ok_or_else(odd)?;
        let is_hex = |text: &str| text.len() == 64 && text.bytes().all(|c| c.is_ascii_hexdigit());
        if !is_hex(secret) || !is_hex(authority) {
            return Err(odd());
        }
        Ok(Self { secret: format!("{JOIN_PREFIX}{secret}"), authority: authority.to_owned() })
    }

    /// The token as one word.
    pub fn text(&self) -> String {
        format!("{}_{}", self.secret, self.authority)
    }
}

/// Waits until the daemon is told to stop, and then until no request is forwarded any more, but at most [`ANSWERS_GRACE`].
async fn unused_after(stop: &mut watch::Receiver<bool>, link: &Arc<Link>) {
    stopped(stop).await;
    let end = Instant::now() + ANSWERS_GRACE;
    // One reference is ours, one is in the list of connections.
    while Arc::strong_count(link) > 2 && Instant::now() < end {
        tokio::time::sleep(UNUSED_LOOK).await;
    }
}

/// Waits until the daemon is told to stop.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped, which is an end too.
    let _ = stop.wait_for(|stop| *stop).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_token_holds_secret_and_authority() {
        let token = ParsedJoinToken { secret: format!("hwj_{}", "a".repeat(64)), authority: "b".repeat(64) };
        let read = ParsedJoinToken::parse(&format!("{}\n", token.text())).unwrap();
        assert_eq!((read.secret, read.authority), (token.secret, token.authority));
        for odd in ["", "hwj_", "hwt_aa", "hwj_aa_bb", &"a".repeat(133)] {
            assert!(ParsedJoinToken::parse(odd).is_err(), "{odd}");
        }
    }
}
