//! Where a server listens: a unix socket or a TCP address, written `unix:PATH` or `tcp:HOST[:PORT]`.

use std::path::PathBuf;
use std::str::FromStr;

use headwater_connections::host_port;

/// The port of NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port; port 0 takes a free port.
    Tcp {
        /// Name or address; IPv6 without brackets.
        host: String,
        /// Port.
        port: u16,
    },
}

/// A text that is not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not an address to listen on: {why}; write unix:PATH or tcp:HOST[:PORT]")]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let fail = |why| AddressError { text: text.to_string(), why };
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err(fail("the path is empty"));
            }
            return Ok(Self::Unix(path.into()));
        }
        let Some(rest) = text.strip_prefix("tcp:") else {
            return Err(fail("it starts with neither unix: nor tcp:"));
        };
        let (host, port) = host_port::split(rest).map_err(fail)?;
        if host.is_empty() {
            return Err(fail("the host is missing, for instance 127.0.0.1"));
        }
        Ok(Self::Tcp { host: host.to_string(), port: port.unwrap_or(DEFAULT_PORT) })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } => write!(f, "tcp:{}", host_port::join(host, *port)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_printed() {
        for text in ["unix:/run/x.sock", "tcp:127.0.0.1:10809", "tcp:[::1]:0", "tcp:localhost:99"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("tcp:[::1]".parse(), Ok(Address::Tcp { host: "::1".into(), port: DEFAULT_PORT }));
        for bad in ["", "/run/x.sock", "unix:", "tcp:", "tcp::1", "tcp:h:70000", "tcp:h:x", "tcp:[::1"] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
