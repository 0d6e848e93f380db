//! Splits and joins a host and a port in the form `HOST:PORT`, with brackets around an IPv6 address.

/// Splits `HOST`, `HOST:PORT`, `[V6]` and `[V6]:PORT`, or says why it cannot. The host may be empty.
pub fn split(text: &str) -> Result<(&str, Option<u16>), &'static str> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').ok_or("the closing bracket is missing")?;
            let port = match after.strip_prefix(':') {
                None if !after.is_empty() => {
                    return Err("only a colon and a port may follow the closing bracket");
                }
                port => port,
            };
            (host, port)
        }
        None => text.rsplit_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map(str::parse).transpose().map_err(|_| "the port is not a number below 65536")?;
    Ok((host, port))
}

/// Joins a host and a port; puts brackets around an IPv6 address.
pub fn join(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_addresses_join_again() {
        for (text, host, port) in [
            ("127.0.0.1:3260", "127.0.0.1", Some(3260)),
            ("[::1]:0", "::1", Some(0)),
            ("localhost:99", "localhost", Some(99)),
            ("[::1]", "::1", None),
            ("0.0.0.0", "0.0.0.0", None),
            (":1", "", Some(1)),
            ("", "", None),
        ] {
            assert_eq!(split(text), Ok((host, port)));
            assert_eq!(
                join(host, port.unwrap_or(7)),
                if port.is_some() { text.into() } else { format!("{text}:7") }
            );
        }
        for (bad, why) in [
            ("h:70000", "the port"),
            ("h:x", "the port"),
            ("h:", "the port"),
            ("[::1", "the closing bracket"),
            ("[::1]x", "only a colon and a port"),
        ] {
            assert!(split(bad).unwrap_err().starts_with(why), "{bad}");
        }
    }
}
