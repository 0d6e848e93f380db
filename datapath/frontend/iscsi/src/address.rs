//! Where a server listens: `tcp:HOST` or `tcp:HOST:PORT`.

use std::str::FromStr;

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

/// A text that is no address.
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
        let (host, port) = match rest.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']').ok_or_else(|| fail("the bracket is not closed"))?;
                (host, after)
            }
            None => rest.split_at(rest.rfind(':').unwrap_or(rest.len())),
        };
        if host.is_empty() {
            return Err(fail("the host is missing, for instance 127.0.0.1"));
        }
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().map_err(|_| fail("the port is not a number below 65536"))?,
            None if port.is_empty() => DEFAULT_PORT,
            None => return Err(fail("something other than a port follows the bracket")),
        };
        Ok(Self { host: host.to_string(), port })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tcp:{}", portal(&self.host, self.port))
    }
}

/// `HOST:PORT`, with brackets where the host is an IPv6 address.
pub(crate) fn portal(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
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
