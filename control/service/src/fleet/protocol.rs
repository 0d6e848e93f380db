//! The first messages on the connection that a node opens to its controller, one line of JSON each.
//!
//! ```text
//!   controller: Ready     node: Join       controller: Joined, the node then connects again with its certificate; or Refused
//!   controller: Ready     node: Hello      controller: Welcome, and then HTTP/2 requests, which are not here; or Refused
//! ```
//! Also here: [`AssignedMachine`], the body of those requests that give a machine to a node.

use headwater_api::platform::Platform;
use headwater_api::{CacheSettings, DiskTransport, Identity, Problem, ProblemKind, SchemeSettings};
use headwater_db::{MachineRecord, Secret};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use uuid::Uuid;

/// The version of the handshake and of the requests that follow. Both sides must have the same.
pub const PROTOCOL: u32 = 1;

/// The longest line.
pub const LINE_MAX_BYTES: usize = 64 << 10;

/// Timeout of a line.
pub const LINE_TIMEOUT: Duration = Duration::from_secs(15);

/// The prefix of join tokens.
pub const JOIN_PREFIX: &str = "hwj_";

/// The first line of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromNode {
    /// Joins the fleet, without a certificate.
    Join(Join),
    /// Connects, with the certificate from joining.
    Hello(Hello),
}

/// What a node says to join: its computer becomes a host of the fleet.
#[derive(Clone, Serialize, Deserialize)]
pub struct Join {
    /// The version of the protocol.
    pub protocol: u32,
    /// The secret of a join token.
    pub secret: String,
    /// The name for the host.
    pub name: String,
    /// Its identity.
    pub host: Uuid,
    /// The public key for its certificate, in hexadecimal digits.
    pub public_key: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its processors.
    pub cpus: u32,
}

impl std::fmt::Debug for Join {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Join").field("name", &self.name).field("host", &self.host).finish_non_exhaustive()
    }
}

/// What a node says whose host has joined.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The version of the protocol.
    pub protocol: u32,
    /// The release of the node.
    pub release: String,
    /// Its identity.
    pub host: Uuid,
    /// Its clock, in milliseconds since 1970.
    pub now_ms: u64,
    /// The highest connection number (generation) that it has seen.
    pub generation: u64,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its processors.
    pub cpus: u32,
}

/// The lines of the controller: [`ToNode::Ready`] after the TLS handshake, and then the answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToNode {
    /// The certificates are accepted. Without this line, a node could not reliably detect that its certificate was refused.
    Ready,
    /// The host has joined.
    Joined {
        /// Its certificate, in PEM.
        certificate: String,
        /// The authority of the fleet, in PEM.
        authority: String,
    },
    /// From here on the controller sends requests.
    Welcome {
        /// The number of this connection, higher than that of each earlier one.
        generation: u64,
        /// The name of the host.
        name: String,
    },
    /// The controller refuses the node, and has changed nothing.
    Refused(Problem),
}

/// A machine that is assigned to a node, with everything that a start needs.
#[derive(Serialize, Deserialize)]
pub(crate) struct AssignedMachine {
    pub(crate) uuid: Uuid,
    pub(crate) name: String,
    pub(crate) mac: String,
    pub(crate) image: String,
    pub(crate) pin: Option<String>,
    /// The version of its catalog's scheme whose settings follow.
    pub(crate) scheme: Option<u32>,
    pub(crate) cache: CacheSettings,
    pub(crate) transport: DiskTransport,
    pub(crate) memory_bytes: u64,
    pub(crate) cpus: u32,
    pub(crate) firmware: headwater_api::platform::Firmware,
    pub(crate) secure_boot: bool,
    pub(crate) tpm: bool,
    pub(crate) display: headwater_api::platform::Display,
    pub(crate) network: headwater_api::platform::Network,
    pub(crate) scratch_bytes: u64,
    pub(crate) identity: Identity,
    pub(crate) ssh_host_key_private: String,
    /// The node ends it when the node's lease is over.
    pub(crate) fenced: bool,
    pub(crate) created_at_ms: u64,
}

impl AssignedMachine {
    /// The machine for its node. A node knows no catalogs: settings of the catalog are copied into the machine.
    pub(crate) fn of(record: &MachineRecord) -> Self {
        let Platform { firmware, secure_boot, tpm, display, network, scratch_bytes } =
            record.platform.clone();
        Self {
            uuid: record.uuid,
            name: record.name.clone(),
            mac: record.mac.clone(),
            image: record.image.clone(),
            pin: record.pin().map(str::to_owned),
            scheme: record.scheme,
            cache: record.cache,
            transport: record.transport,
            memory_bytes: record.memory_bytes,
            cpus: record.cpus,
            firmware,
            secure_boot,
            tpm,
            display,
            network,
            scratch_bytes,
            identity: record.identity.clone(),
            ssh_host_key_private: record.ssh_host_key_private.reveal().to_owned(),
            fenced: record.may_restart_elsewhere(),
            created_at_ms: record.created_at_ms,
        }
    }

    pub(crate) fn platform(&self) -> Platform {
        Platform {
            firmware: self.firmware,
            secure_boot: self.secure_boot,
            tpm: self.tpm,
            display: self.display,
            network: self.network.clone(),
            scratch_bytes: self.scratch_bytes,
        }
    }

    pub(crate) fn settings(&self) -> SchemeSettings {
        SchemeSettings::new(self.cache, self.memory_bytes, self.cpus, self.transport)
            .on(&self.platform())
            .with_user_data(self.identity.user_data.clone())
    }

    pub(crate) fn secret(&self) -> Secret {
        Secret::new(self.ssh_host_key_private.clone())
    }
}

/// The advice if the other end does not speak this protocol.
const PROTOCOL_ADVICE: &str =
    "check whether this is the port of 'serve --nodes', and whether both have the same release";

/// Reads a line, but no byte after it, because those belong to HTTP.
pub async fn read_line<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
    who: &str,
) -> Result<T, Problem> {
    let failed = |why: String| Problem::new(ProblemKind::Unavailable, format!("{who} {why}"));
    let read = async {
        let mut line = Vec::new();
        loop {
            match stream.read_u8().await {
                Ok(b'\n') => return Ok(line),
                Ok(byte) if line.len() < LINE_MAX_BYTES => line.push(byte),
                Ok(_) => {
                    let why = format!(
                        "does not speak the protocol of nodes: its line is longer than {LINE_MAX_BYTES} bytes"
                    );
                    return Err(failed(why).advise(PROTOCOL_ADVICE));
                }
                Err(error) => return Err(failed(format!("has closed the connection: {error}"))),
            }
        }
    };
    let line = tokio::time::timeout(LINE_TIMEOUT, read).await;
    let line =
        line.map_err(|_| failed(format!("sent no complete line within {} s", LINE_TIMEOUT.as_secs())))??;
    serde_json::from_slice(&line).map_err(|error| {
        let message = format!("{who} uses another protocol than this release: {error}");
        Problem::new(ProblemKind::Invalid, message).advise(PROTOCOL_ADVICE)
    })
}

/// Waits until the controller has accepted the connection.
pub async fn wait_until_ready(stream: &mut (impl AsyncRead + Unpin)) -> Result<(), Problem> {
    match read_line(stream, "the controller").await? {
        ToNode::Ready => Ok(()),
        ToNode::Refused(problem) => Err(problem),
        _ => Err(unexpected_answer()),
    }
}

/// The problem of an answer of the controller that is not allowed at its place in the protocol.
pub(crate) fn unexpected_answer() -> Problem {
    Problem::new(ProblemKind::Invalid, "the controller's answer does not fit the protocol of nodes")
        .advise(PROTOCOL_ADVICE)
}

/// Writes a line.
pub async fn write_line<T: Serialize + Sync>(
    stream: &mut (impl AsyncWrite + Unpin),
    value: &T,
) -> Result<(), Problem> {
    let failed = |why: String| Problem::new(ProblemKind::Unavailable, format!("cannot send a line: {why}"));
    let mut line = serde_json::to_vec(value).map_err(|error| failed(error.to_string()))?;
    line.push(b'\n');
    let write = async {
        stream.write_all(&line).await?;
        stream.flush().await
    };
    match tokio::time::timeout(LINE_TIMEOUT, write).await {
        Ok(written) => written.map_err(|error| failed(error.to_string())),
        Err(_) => Err(failed(format!("the other side accepted no bytes for {} s", LINE_TIMEOUT.as_secs()))),
    }
}

/// Fails if the releases of both sides cannot work together.
pub(crate) fn check_protocol(theirs: u32) -> Result<(), Problem> {
    if theirs == PROTOCOL {
        return Ok(());
    }
    let message = format!("the node speaks version {theirs} of the protocol, and the controller {PROTOCOL}");
    Err(Problem::new(ProblemKind::Invalid, message).advise("install the same release on both"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_after_the_line_is_taken() {
        let (mut near, mut far) = tokio::io::duplex(1 << 20);
        write_line(&mut near, &ToNode::Welcome { generation: 7, name: "a".to_owned() }).await.unwrap();
        near.write_all(b"rest").await.unwrap();
        let answer: ToNode = read_line(&mut far, "it").await.unwrap();
        assert!(matches!(answer, ToNode::Welcome { generation: 7, .. }), "{answer:?}");
        let mut rest = [0; 4];
        far.read_exact(&mut rest).await.unwrap();
        assert_eq!(&rest, b"rest");
    }

    #[tokio::test]
    async fn what_is_no_line_of_the_protocol_is_refused() {
        let long = vec![b'x'; LINE_MAX_BYTES + 1];
        for (sent, why) in [
            (&b"GET / HTTP/1.1\n"[..], "uses another protocol"),
            (&b"{\"welcome\""[..], "closed the connection"),
            (&long[..], "longer than 65536 bytes"),
        ] {
            let (mut near, mut far) = tokio::io::duplex(1 << 20);
            near.write_all(sent).await.unwrap();
            drop(near);
            let error = read_line::<ToNode>(&mut far, "it").await.unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
