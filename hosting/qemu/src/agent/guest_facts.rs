//! Asks the agent for facts about its guest: its IP addresses, and how many users are logged in. If the agent
//! cannot tell that, the sessions of users are counted instead.

use std::net::IpAddr;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::generalise::WINDOWS;
use super::{Agent, Exec, MAX_ANSWER_BYTES};
use crate::error::{Error, Result};

/// The most addresses that are accepted from one answer.
const ADDRESSES_MAX: usize = 16;

/// Prints the number of user sessions that systemd knows, or `no-systemd`.
const SESSIONS: &str = "\
command -v grep >/dev/null || exit 1
[ -d /run/systemd/sessions ] || { echo no-systemd; exit 0; }
n=0
for s in /run/systemd/sessions/*; do
  [ -f \"$s\" ] && grep -q ^CLASS=user \"$s\" && ! grep -q ^STATE=closing \"$s\" && n=$((n + 1))
done
echo $n";

/// A network card; fields other than the addresses are ignored.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Interface {
    #[serde(default)]
    ip_addresses: Vec<Address>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Address {
    ip_address: String,
}

/// A user who is logged in to the guest. The agent lists each name once.
#[derive(Deserialize)]
struct User {
    #[expect(dead_code, reason = "never read: an answer without it is no list of users, and fails to parse")]
    user: String,
}

impl Agent {
    /// The addresses by which other hosts can reach the guest, IPv4 first. Empty if the guest has not configured its
    /// network yet.
    pub async fn addresses(&self, timeout: Duration) -> Result<Vec<IpAddr>> {
        let asked = "guest-network-get-interfaces";
        let interfaces: Vec<Interface> =
            self.call_within(asked, json!({}), MAX_ANSWER_BYTES, timeout).await?;
        Ok(reachable(interfaces))
    }

    /// The number of logged-in users, as the agent reports it. If the agent reports none or does not know the command:
    /// the number of systemd's user sessions, in which a user with several sessions counts several times.
    pub async fn users(&self, timeout: Duration) -> Result<usize> {
        let asked = self.call_within::<Vec<User>>("guest-get-users", json!({}), MAX_ANSWER_BYTES, timeout);
        let known = asked.await.map(|users| users.len());
        // An agent that does not know the command may know how to start programs. A silent one is not asked again.
        if !matches!(known, Ok(0) | Err(Error::Agent { .. })) {
            return known;
        }
        let system = self.call_within::<Value>("guest-get-osinfo", json!({}), MAX_ANSWER_BYTES, timeout);
        if system.await.is_ok_and(|system| system.get("id").and_then(Value::as_str) == Some(WINDOWS)) {
            // It has no `sh`, and its agent knows all users.
            return known;
        }
        // The agent reads utmp, which newer systems no longer have.
        let command = ["sh", "-c", SESSIONS].map(str::to_owned).to_vec();
        let output = self.exec(&Exec { command, input: Vec::new(), timeout }).await?;
        let said = String::from_utf8_lossy(&output.stdout);
        match said.trim() {
            "no-systemd" if output.exit_code == 0 => known,
            said => said.parse().ok().filter(|_| output.exit_code == 0).ok_or_else(|| Error::Protocol {
                peer: "the script that counts login sessions",
                detail: format!("it must print a number and exit with 0 (exit code {})", output.exit_code),
            }),
        }
    }
}

fn reachable(interfaces: Vec<Interface>) -> Vec<IpAddr> {
    let all = interfaces.into_iter().flat_map(|interface| interface.ip_addresses);
    let mut found: Vec<IpAddr> = all
        .filter_map(|address| address.ip_address.parse().ok())
        .filter(|address| match address {
            IpAddr::V4(v4) => !(v4.is_loopback() || v4.is_link_local() || v4.is_unspecified()),
            IpAddr::V6(v6) => !(v6.is_loopback() || v6.is_unicast_link_local() || v6.is_unspecified()),
        })
        .collect();
    // A stable sort keeps the guest's order within IPv4 and IPv6.
    found.sort_by_key(IpAddr::is_ipv6);
    found.truncate(ADDRESSES_MAX);
    found
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::super::tests::{accept, answer, answer_to_sync};
    use super::*;

    /// Windows cannot run in this test; its agent answers like this.
    #[tokio::test]
    async fn windows_says_itself_that_nobody_is_logged_in() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let playing = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            let system = r#"{"return": {"id": "mswindows", "name": "Microsoft Windows"}}"#;
            answer(&mut stream, &[r#"{"return": []}"#, system]).await;
        });
        let agent = Agent::new(&socket);
        assert_eq!(agent.users(Duration::from_secs(60)).await.unwrap(), 0);
        playing.await.unwrap();
    }

    #[test]
    fn addresses_of_the_guest_itself_are_left_out() {
        // The answer of qemu-ga 9.2 in a Debian guest.
        let answer = r#"[
            {"name":"lo","ip-addresses":[{"ip-address-type":"ipv4","ip-address":"127.0.0.1","prefix":8},
                {"ip-address-type":"ipv6","ip-address":"::1","prefix":128}],"hardware-address":"00:00:00:00:00:00"},
            {"name":"ens3","ip-addresses":[{"ip-address-type":"ipv6","ip-address":"fec0::5054:ff:fe12:3456","prefix":64},
                {"ip-address-type":"ipv4","ip-address":"10.0.2.15","prefix":24},
                {"ip-address-type":"ipv6","ip-address":"fe80::5054:ff:fe12:3456","prefix":64},
                {"ip-address-type":"ipv4","ip-address":"not an address","prefix":24}],"hardware-address":"52:54:00:12:34:56"},
            {"name":"down0","hardware-address":"02:00:00:00:00:01"}]"#;
        let found = reachable(serde_json::from_str(answer).unwrap());
        let text: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["10.0.2.15", "fec0::5054:ff:fe12:3456"]);
    }

    #[test]
    fn a_guest_with_many_addresses_gives_a_few() {
        let many = (0..1000).map(|n| Address { ip_address: format!("10.0.{}.{}", n / 250, n % 250 + 1) });
        let found = reachable(vec![Interface { ip_addresses: many.collect() }]);
        assert_eq!((found.len(), found[0].to_string()), (ADDRESSES_MAX, "10.0.0.1".to_owned()));
    }
}
