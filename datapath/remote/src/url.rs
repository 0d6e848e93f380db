//! Base URLs of servers: `http://HOST[:PORT][/PATH]` and `https://...`.

use headwater_store::{StoreError, StoreErrorKind};

/// The base URL of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServerUrl {
    /// Whether the scheme is `https`.
    pub tls: bool,
    /// Name or address, without the brackets of IPv6.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Empty, or starts with a slash and does not end with one.
    pub path: String,
}

impl ServerUrl {
    /// The value of the `Host` header.
    pub(crate) fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        if self.port == default_port(self.tls) { host } else { format!("{host}:{}", self.port) }
    }

    /// Whether the host can only be this machine.
    pub(crate) fn is_loopback(&self) -> bool {
        let address = self.host.parse::<std::net::IpAddr>();
        address.map_or(self.host == "localhost", |address| address.is_loopback())
    }

    /// Whether a token may be sent to this server: it must not be visible on a network.
    pub fn may_have_a_token(&self) -> bool {
        self.tls || self.is_loopback()
    }

    /// Whether both are the same server, reached in the same way, whatever their paths.
    pub fn is_same_server(&self, other: &Self) -> bool {
        (self.tls, self.port) == (other.tls, other.port) && self.host.eq_ignore_ascii_case(&other.host)
    }

    /// Parses a comma-separated list of URLs.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, StoreError> {
        text.split(',').map(|part| part.trim().parse()).collect()
    }
}

fn default_port(tls: bool) -> u16 {
    if tls { 443 } else { 80 }
}

impl std::str::FromStr for ServerUrl {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let bad = |why: &str| {
            let text = text.escape_debug();
            StoreError::new(
                StoreErrorKind::Invalid,
                format!("'{text}' is not the URL of a server: {why}; write https://HOST[:PORT][/PATH]"),
            )
        };
        let (tls, rest) = match text.split_once("://") {
            Some(("https", rest)) => (true, rest),
            Some(("http", rest)) => (false, rest),
            _ => return Err(bad("it starts neither with https:// nor with http://")),
        };
        if let Some(odd) = rest.chars().find(|c| !c.is_ascii_graphic() || matches!(c, '?' | '#' | '@' | '\\'))
        {
            return Err(bad(&format!("it contains '{}'", odd.escape_debug())));
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = match authority.strip_prefix('[') {
            Some(inner) => {
                let (host, after) = inner.split_once(']').ok_or_else(|| bad("a ']' is missing"))?;
                (host, after.strip_prefix(':').or(if after.is_empty() { None } else { Some("") }))
            }
            None => authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
        };
        if host.is_empty() {
            return Err(bad("it has no host"));
        }
        // Brackets are allowed only around an IPv6 address, because of its colons.
        let in_brackets = authority.starts_with('[');
        if in_brackets && host.parse::<std::net::Ipv6Addr>().is_err()
            || !in_brackets && host.contains(['[', ']'])
        {
            return Err(bad("'[' and ']' may only enclose an IPv6 address"));
        }
        let port = match port {
            None => default_port(tls),
            Some(port) => match port.parse() {
                Ok(port @ 1..) => port,
                _ => return Err(bad("its port is not a number from 1 to 65535")),
            },
        };
        let path = path.trim_matches('/');
        let path = if path.is_empty() { String::new() } else { format!("/{path}") };
        Ok(Self { tls, host: host.to_owned(), port, path })
    }
}

impl std::fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_survive_parsing_and_printing() {
        for (text, shown) in [
            ("https://a", "https://a"),
            ("https://a:443/", "https://a"),
            ("http://a:8080/images/", "http://a:8080/images"),
            ("http://[::1]:80/x/y", "http://[::1]/x/y"),
            ("https://[2001:db8::1]:8443", "https://[2001:db8::1]:8443"),
        ] {
            let url: ServerUrl = text.parse().unwrap();
            assert_eq!(url.to_string(), shown);
            assert_eq!(shown.parse::<ServerUrl>().unwrap(), url);
        }
        assert_eq!(ServerUrl::parse_list("https://a, http://b:1").unwrap().len(), 2);
        for (text, loopback) in
            [("http://localhost", true), ("http://127.9.9.9", true), ("http://10.0.0.1", false)]
        {
            assert_eq!(text.parse::<ServerUrl>().unwrap().is_loopback(), loopback, "{text}");
        }
    }

    #[test]
    fn a_server_is_its_scheme_host_and_port() {
        let url = |text: &str| text.parse::<ServerUrl>().unwrap();
        let server = url("https://a.example:443/images");
        for same in ["https://a.example", "https://A.Example/other"] {
            assert!(server.is_same_server(&url(same)), "{same}");
        }
        for other in
            ["http://a.example:443", "https://a.example:8443", "https://a.example.org", "https://b.example"]
        {
            assert!(!server.is_same_server(&url(other)), "{other}");
        }
        let may_have = |text: &str| url(text).may_have_a_token();
        assert!(may_have("https://a.example") && may_have("http://127.0.0.1:8080"));
        assert!(!may_have("http://a.example"));
    }

    #[test]
    fn invalid_urls_are_refused_with_the_reason() {
        for (text, says) in [
            ("", "https://"),
            ("ftp://a", "neither"),
            ("https://", "no host"),
            ("https://:80", "no host"),
            ("https://a:", "port"),
            ("https://a:0", "port"),
            ("https://a:70000", "port"),
            ("https://user@a", "contains '@'"),
            ("https://a/?x", "contains '?'"),
            ("https://a b", "contains ' '"),
            ("https://[::1", "']'"),
            ("https://[::1]x", "port"),
            ("https://[[]", "IPv6"),
            ("https://[a]", "IPv6"),
            ("https://a]", "IPv6"),
            ("https://a\r\nX: y", "contains '\\r'"),
        ] {
            let error = text.parse::<ServerUrl>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
