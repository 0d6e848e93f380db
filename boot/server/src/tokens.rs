//! Tokens for settings: each is valid for one use, by the address that fetched the script, within [`TOKEN_LIFE`].

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use crate::targets::Boot;

/// How long a token is valid.
pub const TOKEN_LIFE: Duration = Duration::from_secs(600);
/// The most unused tokens. A further token replaces the oldest.
pub const TOKENS_MAX: usize = 4096;

/// Unused tokens, each with the value that it gives access to.
#[derive(Debug)]
pub struct Tokens<T> {
    waiting: HashMap<String, Waiting<T>>,
}

#[derive(Debug)]
struct Waiting<T> {
    what: T,
    address: IpAddr,
    made: Duration,
}

impl<T> Default for Tokens<T> {
    fn default() -> Self {
        Self { waiting: HashMap::new() }
    }
}

impl Tokens<Boot> {
    /// Adds a token. A machine has one token at a time: a new token replaces the machine's earlier one.
    pub fn add_boot(&mut self, token: [u8; 16], boot: Boot, address: IpAddr, now: Duration) -> String {
        self.waiting.retain(|_, waiting| waiting.what.mac != boot.mac);
        let text: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
        self.add(&text, boot, address, now);
        text
    }
}

impl<T> Tokens<T> {
    /// Adds a token.
    pub fn add(&mut self, token: &str, what: T, address: IpAddr, now: Duration) {
        self.waiting.retain(|_, waiting| !waiting.is_over(now));
        if self.waiting.len() >= TOKENS_MAX {
            let oldest = self.waiting.iter().min_by_key(|(_, waiting)| waiting.made);
            let oldest = oldest.map(|(token, _)| token.clone());
            oldest.map(|oldest| self.waiting.remove(&oldest));
        }
        self.waiting.insert(token.to_owned(), Waiting { what, address, made: now });
    }

    /// Uses up a token and returns its value. A request from another address leaves the token unused.
    pub fn take(&mut self, token: &str, address: IpAddr, now: Duration) -> Option<T> {
        let waiting = self.waiting.get(token)?;
        if waiting.address != address || waiting.is_over(now) {
            return None;
        }
        self.waiting.remove(token).map(|waiting| waiting.what)
    }
}

impl<T> Waiting<T> {
    fn is_over(&self, now: Duration) -> bool {
        self.made + TOKEN_LIFE <= now
    }
}

#[cfg(test)]
mod tests {
    use headwater_dhcp::Mac;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 5));
    const THERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 6));

    fn boot(number: u8) -> Boot {
        Boot {
            machine: format!("pc-{number}"),
            mac: Mac([2, 0, 0, 0, 0, number]),
            version: "debian@1".into(),
            manifest: "0".into(),
            options: String::new(),
            root_partition: 1,
        }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn only_the_address_of_a_token_uses_it_once() {
        let mut tokens = Tokens::default();
        let token = tokens.add_boot([7; 16], boot(1), HERE, at(0));
        assert_eq!(token, "07".repeat(16));
        assert_eq!(tokens.take(&token, THERE, at(1)), None);
        assert_eq!(tokens.take("x", HERE, at(1)), None);
        assert_eq!(tokens.take(&token, HERE, at(1)), Some(boot(1)));
        assert_eq!(tokens.take(&token, HERE, at(1)), None);
    }

    #[test]
    fn a_token_expires_or_is_replaced_by_its_machines_next_token() {
        let mut tokens = Tokens::default();
        let late = tokens.add_boot([1; 16], boot(1), HERE, at(0));
        assert_eq!(tokens.take(&late, HERE, TOKEN_LIFE), None);
        let first = tokens.add_boot([2; 16], boot(1), HERE, at(700));
        let second = tokens.add_boot([3; 16], boot(1), HERE, at(701));
        assert_eq!(tokens.take(&first, HERE, at(702)), None);
        assert!(tokens.take(&second, HERE, at(702)).is_some());
    }
}
