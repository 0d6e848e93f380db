//! Where a server listens: `tcp:HOST` or `tcp:HOST:PORT`.

use std::str::FromStr;

use headwater_connections::host_port;

/// The port of iSCSI.
pub const DEFAULT_PORT: u16 = 3260;

/// A TCP address to listen on; port 0 takes a free one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Name or address; IPv6 without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

/// A text that is not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not an address to listen on: {why}; write tcp:HOST or tcp:HOST:PORT")]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let fail = |why| AddressError { text: text.to_string(), why };
        let rest = text.strip_prefix("tcp:").ok_or_else(|| fail("it does not start with tcp:"))?;
        let (host, port) = host_port::split(rest).map_err(fail)?;
        if host.is_empty() {
            return Err(fail("the host is missing, for instance 127.0.0.1"));
        }
        Ok(Self { host: host.to_string(), port: port.unwrap_or(DEFAULT_PORT) })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tcp:{}", host_port::join(&self.host, self.port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_printed() {
        for text in ["tcp:127.0.0.1:3260", "tcp:[::1]:0", "tcp:localhost:99"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for (text, host) in [("tcp:[::1]", "::1"), ("tcp:0.0.0.0", "0.0.0.0")] {
            assert_eq!(text.parse(), Ok(Address { host: host.into(), port: DEFAULT_PORT }));
        }
        for bad in
            ["", "127.0.0.1", "unix:/x", "tcp:", "tcp::1", "tcp:h:70000", "tcp:h:x", "tcp:[::1", "tcp:[::1]x"]
        {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
