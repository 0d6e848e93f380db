//! Connects to an NBD server, and does the client's side of the handshake. Requests after the handshake are in `transfer.rs`.

use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use headwater_block::MAX_REQUEST_BYTES;

use super::ClientOptions;
use super::uri::{NbdUri, ServerAddress, UriError};
use crate::socket::Socket;
use crate::tls::{ClientTls, TlsError};
use crate::wire::WireError;
use crate::wire::handshake::{
    BASE_ALLOCATION, GREETING_BYTES, GoData, InfoItem, MetaContextData, OPTION_REPLY_BYTES, OptionReplyHead,
    decode_greeting, decode_meta_context, encode_option, handshake_flag, info, option, reply,
};

/// The longest reply to an option, in bytes.
const REPLY_MAX_BYTES: u32 = 64 << 10;
/// The most replies to one option: an informational reply may come many times before the last one.
const REPLIES_MAX: u32 = 10_000;

/// Why an export could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The text is not a URI.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// No server answers at that address.
    #[error("cannot connect to {uri} (is the server running, and is the address right?): {source}")]
    Unreachable {
        /// Where.
        uri: String,
        /// Why.
        source: std::io::Error,
    },
    /// The handshake took too long.
    #[error(
        "{uri} did not finish the handshake within {timeout_ms} ms; it may be overloaded, or no NBD server"
    )]
    TimedOut {
        /// Where.
        uri: String,
        /// The limit.
        timeout_ms: u64,
    },
    /// The server speaks another protocol, or breaks this one.
    #[error("{uri} does not follow the NBD protocol: {source}")]
    Protocol {
        /// Where.
        uri: String,
        /// What is wrong.
        source: WireError,
    },
    /// The export does not exist.
    #[error("{uri} has no export '{export}'{}{}", said(.why), listed(.available))]
    UnknownExport {
        /// Where.
        uri: String,
        /// The requested name.
        export: String,
        /// The server's words; may be empty.
        why: String,
        /// The names of existing exports, if the server lists them.
        available: Vec<String>,
    },
    /// The server refuses.
    #[error("{uri} refused to open the export: {why}")]
    Refused {
        /// Where.
        uri: String,
        /// The server's words.
        why: String,
    },
    /// TLS cannot be set up on this side.
    #[error("cannot open {uri}: {source}")]
    Tls {
        /// Where.
        uri: String,
        /// Why.
        source: TlsError,
    },
    /// The two sides do not agree on TLS.
    #[error("cannot make an encrypted connection to {uri}: {why}")]
    NotEncrypted {
        /// Where.
        uri: String,
        /// Why.
        why: String,
    },
    /// The export cannot be a device.
    #[error("{uri} cannot be used as a disk: {why}")]
    Unusable {
        /// Where.
        uri: String,
        /// What does not fit.
        why: String,
    },
    /// The connection broke during the handshake, or this machine lacks a resource.
    #[error("cannot open {uri}: {source}")]
    System {
        /// Where.
        uri: String,
        /// Why.
        source: std::io::Error,
    },
}

fn said(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(": {}", why.escape_debug()) }
}

fn listed(available: &[String]) -> String {
    if available.is_empty() {
        return String::new();
    }
    let names: Vec<String> =
        available.iter().take(20).map(|name| format!("'{}'", name.escape_debug())).collect();
    format!("; it has {}", names.join(", "))
}

/// The result of the handshake.
pub(super) struct Negotiated {
    pub(super) size_bytes: u64,
    pub(super) flags: u16,
    pub(super) logical_block_bytes: u32,
    pub(super) physical_block_bytes: u32,
    pub(super) maximum_bytes: u64,
    pub(super) structured: bool,
    /// The id of the metadata context `base:allocation`, if the server granted it.
    pub(super) base_allocation: Option<u32>,
    pub(super) description: String,
}

pub(super) fn connect(uri: &NbdUri, options: &ClientOptions) -> Result<(Socket, Negotiated), ConnectError> {
    let timeout = Duration::from_millis(options.connect_timeout_ms);
    let text = uri.to_string();
    let unreachable = |source| ConnectError::Unreachable { uri: text.clone(), source };
    let Some(deadline) = Instant::now().checked_add(timeout) else {
        return Err(ConnectError::Unusable {
            uri: text,
            why: "the timeout is too long for the clock".into(),
        });
    };
    let socket = match &uri.server {
        ServerAddress::Unix(path) => {
            Socket::new(OwnedFd::from(UnixStream::connect(path).map_err(unreachable)?))
        }
        ServerAddress::Tcp { host, port } => {
            let stream = connect_tcp(host, *port, timeout).map_err(unreachable)?;
            let socket = Socket::new(OwnedFd::from(stream));
            headwater_block::tcp::tune(&socket);
            socket
        }
    };
    let mut session =
        Session { socket: &socket, uri: &text, deadline, timeout_ms: options.connect_timeout_ms };
    session.greet()?;
    if let Some(tls) = &uri.tls {
        let host = match &uri.server {
            ServerAddress::Tcp { host, .. } => host,
            ServerAddress::Unix(_) => "localhost",
        };
        session.encrypt(tls, host)?;
    }
    let negotiated = session.negotiate(&uri.export)?;
    Ok((socket, negotiated))
}

fn connect_tcp(host: &str, port: u16, timeout: Duration) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

struct Session<'a> {
    socket: &'a Socket,
    uri: &'a str,
    deadline: Instant,
    timeout_ms: u64,
}

/// The reply that ends an option.
enum LastReply {
    Ack,
    Error { code: u32, message: String },
}

impl Session<'_> {
    fn greet(&mut self) -> Result<(), ConnectError> {
        let mut greeting = [0; GREETING_BYTES];
        self.receive(&mut greeting)?;
        let server = decode_greeting(&greeting).map_err(|e| self.protocol(e))?;
        if server & handshake_flag::FIXED_NEWSTYLE == 0 {
            return Err(self.unusable("the server is too old: it does not speak fixed newstyle"));
        }
        let flags = handshake_flag::FIXED_NEWSTYLE | (server & handshake_flag::NO_ZEROES);
        self.send(&u32::from(flags).to_be_bytes())
    }

    fn encrypt(&mut self, tls: &ClientTls, host: &str) -> Result<(), ConnectError> {
        let uri = self.uri.to_string();
        let connection = match tls.connection(host) {
            Ok(connection) => connection,
            Err(source) => return Err(ConnectError::Tls { uri, source }),
        };
        if let LastReply::Error { code, message } = self.ask(option::STARTTLS, &[], |_, _| Ok(()))? {
            let why = match code {
                reply::ERR_UNSUP | reply::ERR_POLICY => {
                    "the server has no TLS; write nbd:// or nbd+unix://".into()
                }
                _ => format!("{} (error {code:#x})", message.escape_debug()),
            };
            return Err(ConnectError::NotEncrypted { uri, why });
        }
        self.socket.secure(connection, self.deadline).map_err(|source| match source.kind() {
            std::io::ErrorKind::TimedOut => self.broken(source),
            std::io::ErrorKind::UnexpectedEof => ConnectError::NotEncrypted {
                uri,
                why: "the server hung up; it may want a certificate that this client does not have".into(),
            },
            _ => ConnectError::NotEncrypted { uri, why: source.to_string() },
        })
    }

    fn negotiate(&mut self, export: &str) -> Result<Negotiated, ConnectError> {
        let structured = matches!(self.ask(option::STRUCTURED_REPLY, &[], |_, _| Ok(()))?, LastReply::Ack);
        let mut base_allocation = None;
        if structured {
            base_allocation = self.ask_for_extents(export)?;
        }
        let mut items = Vec::new();
        let mut data = Vec::new();
        GoData { name: export, wanted: vec![info::BLOCK_SIZE, info::DESCRIPTION] }.encode(&mut data);
        let answer = self.ask(option::GO, &data, |kind, data| {
            if kind == reply::INFO {
                items.push(InfoItem::decode(data)?);
            }
            Ok(())
        })?;
        match answer {
            LastReply::Ack => self.conclude(items, structured, base_allocation),
            LastReply::Error { code: reply::ERR_UNKNOWN, message } => Err(ConnectError::UnknownExport {
                uri: self.uri.to_string(),
                export: export.to_string(),
                why: message,
                available: self.list().unwrap_or_default(),
            }),
            LastReply::Error { code, message } => {
                let why = match code {
                    reply::ERR_UNSUP => {
                        "the server does not support NBD_OPT_GO (in the NBD protocol since 2016)".into()
                    }
                    reply::ERR_TLS_REQD => "it demands TLS; write nbds:// or nbds+unix://".into(),
                    _ if message.is_empty() => format!("error {code:#x}"),
                    _ => format!("{} (error {code:#x})", message.escape_debug()),
                };
                Err(ConnectError::Refused { uri: self.uri.to_string(), why })
            }
        }
    }

    fn ask_for_extents(&mut self, export: &str) -> Result<Option<u32>, ConnectError> {
        let mut granted = None;
        let mut data = Vec::new();
        MetaContextData { name: export, queries: vec![BASE_ALLOCATION] }.encode(&mut data);
        let answer = self.ask(option::SET_META_CONTEXT, &data, |kind, data| {
            if kind == reply::META_CONTEXT {
                let (id, name) = decode_meta_context(data)?;
                if name == BASE_ALLOCATION {
                    granted = Some(id);
                }
            }
            Ok(())
        })?;
        Ok(granted.filter(|_| matches!(answer, LastReply::Ack)))
    }

    fn list(&mut self) -> Result<Vec<String>, ConnectError> {
        let mut names = Vec::new();
        self.ask(option::LIST, &[], |kind, data| {
            if kind == reply::SERVER
                && let Some((length, rest)) = data.split_first_chunk()
                && let Some(name) =
                    usize::try_from(u32::from_be_bytes(*length)).ok().and_then(|length| rest.get(..length))
            {
                names.push(String::from_utf8_lossy(name).into_owned());
            }
            Ok(())
        })?;
        Ok(names)
    }

    fn conclude(
        &self,
        items: Vec<InfoItem>,
        structured: bool,
        base_allocation: Option<u32>,
    ) -> Result<Negotiated, ConnectError> {
        let mut out = Negotiated {
            size_bytes: 0,
            flags: 0,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            maximum_bytes: MAX_REQUEST_BYTES.into(),
            structured,
            base_allocation,
            description: String::new(),
        };
        let mut has_size = false;
        for item in items {
            match item {
                InfoItem::Export { size_bytes, flags } => {
                    has_size = true;
                    out.size_bytes = size_bytes;
                    out.flags = flags;
                }
                InfoItem::Description(text) => out.description = text,
                InfoItem::BlockSize { minimum, preferred, maximum } => {
                    if !minimum.is_power_of_two() || minimum > 4096 {
                        return Err(
                            self.unusable(format!(
                                "its minimum block size is {minimum} bytes, and only powers of two up to 4096 are supported"
                            ))
                        );
                    }
                    out.logical_block_bytes = if minimum <= 512 { 512 } else { 4096 };
                    out.physical_block_bytes = preferred.clamp(out.logical_block_bytes, 1 << 20);
                    let block = out.logical_block_bytes;
                    let usable = maximum.min(MAX_REQUEST_BYTES);
                    let maximum = usable.saturating_sub(usable.checked_rem(block).unwrap_or(0)).max(block);
                    out.maximum_bytes = maximum.into();
                }
                InfoItem::Name(_) | InfoItem::Other(_) => {}
            }
        }
        if !has_size {
            return Err(self.unusable("the server did not send the export's size"));
        }
        let block = u64::from(out.logical_block_bytes);
        if !out.size_bytes.is_multiple_of(block) {
            return Err(self.unusable(format!(
                "its size of {} bytes is not a multiple of {block}; pad it, for instance with 'truncate' or 'qemu-img resize'",
                out.size_bytes
            )));
        }
        Ok(out)
    }

    /// Sends an option, calls a function with each reply before the last one, and returns the last one.
    fn ask(
        &mut self,
        number: u32,
        data: &[u8],
        mut each: impl FnMut(u32, &[u8]) -> Result<(), WireError>,
    ) -> Result<LastReply, ConnectError> {
        let mut out = Vec::new();
        encode_option(&mut out, number, data);
        self.send(&out)?;
        for _ in 0..REPLIES_MAX {
            let mut head = [0; OPTION_REPLY_BYTES];
            self.receive(&mut head)?;
            let head = OptionReplyHead::decode(&head).map_err(|e| self.protocol(e))?;
            if head.length > REPLY_MAX_BYTES {
                let (found, limit) = (head.length.into(), REPLY_MAX_BYTES.into());
                return Err(self.protocol(WireError::TooLong { what: "option reply", found, limit }));
            }
            if head.option != number {
                let why = "it is for another option than the client sent";
                return Err(self.protocol(WireError::Malformed { what: "option reply", why }));
            }
            let mut data = vec![0; usize::try_from(head.length).unwrap_or(0)];
            self.receive(&mut data)?;
            if head.reply == reply::ACK {
                return Ok(LastReply::Ack);
            }
            if head.reply & reply::ERROR_BIT != 0 {
                let message = String::from_utf8_lossy(&data).into_owned();
                return Ok(LastReply::Error { code: head.reply, message });
            }
            each(head.reply, &data).map_err(|e| self.protocol(e))?;
        }
        Err(self.protocol(WireError::Malformed { what: "option reply", why: "there are too many" }))
    }

    fn send(&self, bytes: &[u8]) -> Result<(), ConnectError> {
        self.socket.send_before(bytes, self.deadline).map_err(|e| self.broken(e))
    }

    fn receive(&self, into: &mut [u8]) -> Result<(), ConnectError> {
        if into.is_empty() {
            return Ok(());
        }
        match self.socket.receive_exact(into, self.deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.broken(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                "the server closed the connection in the handshake",
            ))),
            Err(error) => Err(self.broken(error)),
        }
    }

    fn broken(&self, source: std::io::Error) -> ConnectError {
        let uri = self.uri.to_string();
        if source.kind() == std::io::ErrorKind::TimedOut {
            return ConnectError::TimedOut { uri, timeout_ms: self.timeout_ms };
        }
        ConnectError::System { uri, source }
    }

    fn protocol(&self, source: WireError) -> ConnectError {
        ConnectError::Protocol { uri: self.uri.to_string(), source }
    }

    fn unusable(&self, why: impl Into<String>) -> ConnectError {
        ConnectError::Unusable { uri: self.uri.to_string(), why: why.into() }
    }
}
