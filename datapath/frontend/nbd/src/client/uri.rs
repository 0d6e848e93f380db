//! NBD URIs: `nbd://host:port/name` and `nbd+unix:///name?socket=PATH`, with percent-encoding; `nbds` and
//! `nbds+unix` for TLS, with libnbd's parameters `tls-certificates` and `tls-hostname`. URIs for vsock are
//! refused with a message that names vsock.

use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::str::FromStr;

use headwater_connections::host_port;

use crate::address::DEFAULT_PORT;
use crate::tls::ClientTls;

/// Where an export is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// How to reach the server.
    pub server: ServerAddress,
    /// The export's name; empty for the default one.
    pub export: String,
    /// TLS, if the scheme asks for it.
    pub tls: Option<ClientTls>,
}

/// How to reach a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddress {
    /// By TCP.
    Tcp {
        /// Name or address.
        host: String,
        /// Port.
        port: u16,
    },
    /// By unix socket.
    Unix(PathBuf),
}

/// A text that is not an NBD URI, or a URI of a transport that is not supported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot use '{uri}' as an NBD URI: {why}; write nbd://HOST[:PORT]/NAME or nbd+unix:///NAME?socket=PATH, or with TLS nbds:// or \
     nbds+unix://"
)]
pub struct UriError {
    uri: String,
    why: &'static str,
}

impl NbdUri {
    /// Whether a text looks like an NBD URI and not like a file name.
    pub fn is_uri(text: &str) -> bool {
        let schemes = ["nbd:", "nbds:", "nbd+unix:", "nbds+unix:", "nbd+vsock:", "nbds+vsock:"];
        schemes.iter().any(|scheme| text.starts_with(scheme))
    }

    /// The paths in the URI: of the socket and of the certificates.
    pub fn paths_mut(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let socket = match &mut self.server {
            ServerAddress::Unix(path) => Some(path),
            ServerAddress::Tcp { .. } => None,
        };
        let certificates = self.tls.as_mut().and_then(|tls| tls.certificates.as_mut());
        socket.into_iter().chain(certificates)
    }
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let fail = |why| UriError { uri: text.to_string(), why };
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(fail("it has no ://"));
        };
        let rest = rest.split_once('#').map_or(rest, |(before, _)| before);
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let export = unescape(path)
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .ok_or_else(|| fail("its export name is not valid percent-encoded UTF-8"))?;
        let parameter = |name: &str| {
            let value =
                query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name);
            value.map(|(_, value)| value).filter(|value| !value.is_empty())
        };
        let path_of = |value| unescape(value).map(|bytes| PathBuf::from(std::ffi::OsString::from_vec(bytes)));
        let server = match scheme {
            "nbd" | "nbds" => {
                let (host, port) =
                    host_port::split(authority).map_err(|_| fail("its port is not a number below 65536"))?;
                let host = if host.is_empty() { "localhost" } else { host };
                ServerAddress::Tcp { host: host.to_string(), port: port.unwrap_or(DEFAULT_PORT) }
            }
            "nbd+unix" | "nbds+unix" => {
                if !authority.is_empty() {
                    return Err(fail("a unix socket has no host: three slashes come before the name"));
                }
                let socket = parameter("socket").ok_or_else(|| fail("?socket=PATH is missing"))?;
                let path =
                    path_of(socket).ok_or_else(|| fail("its socket path is not valid percent-encoding"))?;
                ServerAddress::Unix(path)
            }
            "nbd+vsock" | "nbds+vsock" => {
                return Err(fail("vsock is not supported; TCP and unix sockets are"));
            }
            _ => return Err(fail("its scheme is none of nbd, nbds, nbd+unix and nbds+unix")),
        };
        let mut tls = scheme.starts_with("nbds").then(ClientTls::default);
        if let Some(tls) = &mut tls {
            let unreadable = || fail("its tls-certificates or tls-hostname is not valid percent-encoding");
            if let Some(directory) = parameter("tls-certificates") {
                tls.certificates = Some(path_of(directory).ok_or_else(unreadable)?);
            }
            if let Some(name) = parameter("tls-hostname") {
                let name = unescape(name).and_then(|bytes| String::from_utf8(bytes).ok());
                tls.hostname = Some(name.ok_or_else(unreadable)?);
            }
        }
        Ok(Self { server, export, tls })
    }
}

impl std::fmt::Display for NbdUri {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use std::os::unix::ffi::OsStrExt;
        let name = escape(self.export.as_bytes(), false);
        let scheme = if self.tls.is_some() { "nbds" } else { "nbd" };
        let mut parameters = Vec::new();
        match &self.server {
            ServerAddress::Tcp { host, port } => {
                write!(f, "{scheme}://{}/{name}", host_port::join(host, *port))?;
            }
            ServerAddress::Unix(path) => {
                write!(f, "{scheme}+unix:///{name}")?;
                parameters.push(format!("socket={}", escape(path.as_os_str().as_bytes(), true)));
            }
        }
        if let Some(tls) = &self.tls {
            let directory = tls.certificates.iter().map(|d| ("certificates", d.as_os_str().as_bytes()));
            let hostname = tls.hostname.iter().map(|name| ("hostname", name.as_bytes()));
            parameters.extend(
                directory.chain(hostname).map(|(key, value)| format!("tls-{key}={}", escape(value, true))),
            );
        }
        if !parameters.is_empty() {
            write!(f, "?{}", parameters.join("&"))?;
        }
        Ok(())
    }
}

/// Percent-encodes all characters except unreserved ones; keeps slashes if asked.
pub(crate) fn escape(bytes: &[u8], keep_slashes: bool) -> String {
    use std::fmt::Write;
    let mut out = String::with_capacity(bytes.len());
    for byte in bytes {
        let plain = byte.is_ascii_alphanumeric() || b"-._~".contains(byte) || (keep_slashes && *byte == b'/');
        if plain {
            out.push(char::from(*byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let high = char::from(bytes.next()?).to_digit(16)?;
        let low = char::from(bytes.next()?).to_digit(16)?;
        out.push(u8::try_from(high.wrapping_mul(16).wrapping_add(low)).ok()?);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn uris_of_other_tools_are_understood() {
        let tcp = |host: &str, port, export: &str| NbdUri {
            server: ServerAddress::Tcp { host: host.into(), port },
            export: export.into(),
            tls: None,
        };
        assert_eq!("nbd://localhost".parse(), Ok(tcp("localhost", 10809, "")));
        assert_eq!("nbd://10.0.0.1:99/a%20b".parse(), Ok(tcp("10.0.0.1", 99, "a b")));
        assert_eq!("nbd://[::1]:99/x".parse(), Ok(tcp("::1", 99, "x")));
        let unix: NbdUri = "nbd+unix:///disk?socket=/tmp/a%20b.sock".parse().unwrap();
        assert_eq!(unix.server, ServerAddress::Unix("/tmp/a b.sock".into()));
        assert_eq!(unix.export, "disk");
        let secure: NbdUri =
            "nbds://h/x?tls-certificates=/etc/pki/a%20b&tls-hostname=disk.example".parse().unwrap();
        let tls =
            ClientTls { certificates: Some("/etc/pki/a b".into()), hostname: Some("disk.example".into()) };
        assert_eq!(secure, NbdUri { tls: Some(tls), ..tcp("h", 10809, "x") });
        let plain: NbdUri = "nbd://h/x?tls-hostname=y".parse().unwrap();
        assert_eq!(plain, tcp("h", 10809, "x"), "TLS parameters are ignored without TLS");
    }

    #[test]
    fn invalid_uris_are_refused_with_a_reason() {
        for (bad, why) in [
            ("disk.img", "://"),
            ("http://x/y", "scheme"),
            ("nbd+vsock://2:10809/x", "TCP and unix sockets are"),
            ("nbds+vsock://2/x", "vsock is not supported"),
            ("nbds://x/y?tls-hostname=%zz", "tls-hostname"),
            ("nbds+unix:///x", "socket"),
            ("nbd+unix:///x", "socket"),
            ("nbd+unix://host/x?socket=/s", "host"),
            ("nbd://host:99999/", "port"),
            ("nbd://host/%zz", "name"),
        ] {
            let error = bad.parse::<NbdUri>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(NbdUri::is_uri("nbd+vsock://2/x") && NbdUri::is_uri("nbds+vsock://2/x"));
    }

    proptest! {
        #[test]
        fn printed_uris_are_parsed_back(
            export in "\\PC{0,20}",
            path in "/\\PC{1,30}",
            port: u16,
            unix: bool,
            tls in proptest::option::of((
                proptest::option::of("/\\PC{1,20}"),
                proptest::option::of("\\PC{1,20}"),
            )),
        ) {
            let tls = tls.map(|(certificates, hostname)| ClientTls {
                certificates: certificates.map(PathBuf::from),
                hostname,
            });
            let server = if unix {
                ServerAddress::Unix(path.into())
            } else {
                ServerAddress::Tcp { host: "h".into(), port }
            };
            let uri = NbdUri { server, export, tls };
            prop_assert_eq!(uri.to_string().parse(), Ok(uri));
        }

        #[test]
        fn random_text_does_not_panic(text in "\\PC{0,60}") {
            let _ = text.parse::<NbdUri>();
            let _ = format!("nbd+unix:///{text}").parse::<NbdUri>();
        }
    }
}
