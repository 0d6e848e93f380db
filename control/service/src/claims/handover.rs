//! Gives the holder of a claim the machine's addresses, and a secret that only its guest knows too.
//!
//! Guests are asked for their addresses as soon as they have booted, so that a claim need not wait. A secret is made for
//! each claim that requests one, goes to the guest through its agent, and is stored in no database, log or event.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use headwater_api::Claim;
use headwater_db::DbError;
use serde_json::json;

use crate::Service;
use crate::lifecycle::Active;

/// How long a claim waits if the machine's addresses are not known yet.
const ADDRESSES_SOON: Duration = Duration::from_millis(100);

/// Timeout of a guest agent that is asked for addresses.
const GUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of a guest that is asked who is logged in. It starts several programs to find out, and may be busy.
const USERS_TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout of a guest that gets a secret, including its own program that accepts it.
const SECRET_TIMEOUT: Duration = Duration::from_secs(60);

/// The characters of a secret. No two of them look alike.
const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

/// The number of characters of a secret: 160 bits.
const SECRET_LEN: usize = 32;

/// The guest's script that stores a secret for root, and passes it to the guest's own program `/etc/headwater/claimed` if
/// that exists.
const ACCEPT: &str = "\
umask 077 && mkdir -p /run/headwater && cat >/run/headwater/claim.$$ && mv /run/headwater/claim.$$ /run/headwater/claim.json || exit 1
if [ -x /etc/headwater/claimed ]; then exec /etc/headwater/claimed /run/headwater/claim.json; fi";

/// The most characters of the guest's output in an error message.
const SAID_CHARS: usize = 200;

impl Service {
    /// The addresses of a machine. If the guest was not asked yet, waits briefly for its answer.
    pub(super) async fn addresses_of(&self, active: &Arc<Active>) -> Vec<IpAddr> {
        if let Some(known) = active.guest().addresses() {
            return known;
        }
        // This task runs to its end even if the caller no longer waits, so that the next call finds the addresses.
        let asked = self.learn_addresses(active);
        if let Some(asked) = asked {
            let _ = tokio::time::timeout(ADDRESSES_SOON, asked).await;
        }
        active.guest().addresses().unwrap_or_default()
    }

    /// Asks a guest for its addresses, unless they are known or the last question was a moment ago.
    pub(super) fn learn_addresses(&self, active: &Arc<Active>) -> Option<tokio::task::JoinHandle<()>> {
        if !active.guest().may_ask_addresses() {
            return None;
        }
        let active = Arc::clone(active);
        Some(tokio::spawn(async move {
            let answer = tokio::time::timeout(GUEST_TIMEOUT, active.vm.addresses()).await;
            match answer {
                Ok(Ok(addresses)) => active.guest().set_addresses(addresses),
                // No agent answers, or not yet.
                Ok(Err(_)) | Err(_) => active.guest().no_answer(),
            }
        }))
    }

    /// Asks the guest who is logged in. Returns whether the last user has logged off.
    pub(super) async fn has_logged_off(&self, active: &Active) -> bool {
        if !active.guest().may_ask_users() {
            return false;
        }
        let answer = tokio::time::timeout(USERS_TIMEOUT, active.vm.users()).await;
        active.guest().users_asked();
        match answer {
            Ok(Ok(users)) => active.guest().saw_users(users),
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Makes a secret for a claim, and gives it to the guest. The inner error says why the guest did not get it.
    pub(super) async fn hand_over(&self, claim: &Claim) -> Result<Result<String, String>, DbError> {
        let Some(record) = self.running_claim(claim.id).await? else {
            return Ok(Err("its claim has ended".to_owned()));
        };
        let Some(active) = self.active(record.machine) else {
            return Ok(Err("the machine is off, or was reset just now".to_owned()));
        };
        let given = self.give_secret(claim, &active).await;
        // If the machine was reset meanwhile, the guest does not have the secret.
        Ok(match self.is_present(record.machine, &active) {
            true => given,
            false => Err("the machine was reset or switched off meanwhile".to_owned()),
        })
    }

    async fn give_secret(&self, claim: &Claim, active: &Active) -> Result<String, String> {
        let mut bytes = [0; SECRET_LEN];
        self.random().fill(&mut bytes).map_err(|e| format!("the system gave no random numbers: {e}"))?;
        let letter = |byte: &u8| LETTERS.get(usize::from(byte % 32)).copied().map_or('a', char::from);
        let secret: String = bytes.iter().map(letter).collect();
        let note = json!({
            "claim": claim.id,
            "for": claim.holder,
            "expires_at_ms": claim.expires_at_ms,
            "secret": secret,
        });
        let argv = ["sh", "-c", ACCEPT].map(str::to_owned);
        let done = active.vm.exec(&argv, note.to_string().into_bytes(), SECRET_TIMEOUT).await;
        let done = done.map_err(|e| e.to_string())?;
        if done.exit_code == 0 {
            return Ok(secret);
        }
        let said = String::from_utf8_lossy(&done.stderr).replace(&secret, "(secret)");
        let said: String =
            said.chars().take(SAID_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
        Err(format!(
            "the guest did not accept the secret: /etc/headwater/claimed failed with exit code {}: {}",
            done.exit_code,
            said.trim()
        ))
    }
}
