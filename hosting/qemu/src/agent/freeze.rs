//! Freezes a guest's file systems, and always thaws them again: a guest that stays frozen is lost to its user.
//!
//! The agent carries out one command at a time. While it freezes a busy file system it answers no command, not even a
//! thaw. It may finish the freeze long after every caller has timed out. So an unanswered thaw is repeated until the
//! agent answers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;

use super::{Agent, MAX_ANSWER_BYTES, unexpected};
use crate::error::{Error, Result};

pub(super) const FREEZE: &str = "guest-fsfreeze-freeze";
pub(super) const THAW: &str = "guest-fsfreeze-thaw";

/// How long other calls may use the agent before an unanswered thaw is repeated.
const THAW_AGAIN: Duration = Duration::from_millis(500);

impl Agent {
    /// Writes out and freezes the guest's file systems until they are thawed. Returns their number.
    pub async fn freeze_file_systems(&self) -> Result<u64> {
        if self.owes_thaw.load(Ordering::Relaxed) {
            // Thaw the earlier freeze now: a later repetition of that thaw would end this freeze.
            self.call(THAW, json!({})).await?;
        }
        let answer = self.call(FREEZE, json!({})).await;
        let frozen = answer.and_then(|count| count.as_u64().ok_or_else(|| unexpected(FREEZE, &count)));
        // The agent may have frozen some file systems, or may freeze them later.
        if frozen.is_err()
            && let Err(thaw) = self.thaw_file_systems().await
        {
            tracing::warn!(error = %thaw, "cannot thaw file systems of the guest after a failed freeze: writes in the guest may wait");
        }
        frozen
    }

    /// Thaws the guest's file systems. If the agent does not answer, the request is repeated in the background until it
    /// answers, or until the last handle to the machine is dropped.
    pub async fn thaw_file_systems(&self) -> Result<()> {
        match self.call(THAW, json!({})).await {
            Err(error) if !matches!(error, Error::Agent { .. }) => {
                if !self.owes_thaw.swap(true, Ordering::Relaxed) {
                    self.thaw_in_background();
                }
                Err(error)
            }
            outcome => outcome.map(drop),
        }
    }

    fn thaw_in_background(&self) {
        let alive = Arc::downgrade(&self.connection);
        let agent = Self { connection: Arc::default(), ..self.clone() };
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(THAW_AGAIN).await;
                let Some(connection) = alive.upgrade() else { return };
                let agent = Self { connection, ..agent.clone() };
                match timeout(agent.timeout, agent.thaw_if_owed()).await {
                    Ok(Ok(true)) => tracing::info!("the guest's file systems are thawed now"),
                    Ok(Err(error @ Error::Agent { .. })) => {
                        tracing::warn!(%error, "cannot thaw file systems of the guest: writes in the guest may wait");
                    }
                    Ok(Ok(false)) => {}
                    Ok(Err(_)) | Err(_) => continue,
                }
                return;
            }
        });
    }

    /// Thaws if a thaw is still due, and returns whether it did. If another call has thawed meanwhile, a later freeze
    /// is left alone.
    async fn thaw_if_owed(&self) -> Result<bool> {
        let slot = self.connection.lock().await;
        if !self.owes_thaw.load(Ordering::Relaxed) {
            return Ok(false);
        }
        self.is_frozen.send_replace(false);
        self.converse::<Value>(slot, THAW, json!({}), MAX_ANSWER_BYTES).await.map(|_| true)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::super::tests::{accept, answer, answer_to_sync};
    use super::*;

    #[tokio::test]
    async fn a_guest_that_freezes_after_all_timeouts_is_thawed() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let player = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            answer(&mut stream, &[r#"{"return": {}}"#]).await;
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            assert!(line.contains(FREEZE), "{line}");
            // The agent freezes, and reads nothing: only the syncs of repeated thaws stay in the port.
            let mut stale = Vec::new();
            for _ in 0..3 {
                let (mut stream, id) = accept(&listener).await;
                assert_eq!(stream.read_line(&mut String::new()).await.unwrap(), 0);
                stale.push(id);
            }
            // The agent continues, perhaps too late for the thaw of that moment.
            loop {
                let (mut stream, id) = accept(&listener).await;
                let mut late = b"{\"return\": 1}\n".to_vec();
                late.extend(stale.drain(..).chain([id]).flat_map(answer_to_sync));
                line.clear();
                if stream.write_all(&late).await.is_ok()
                    && stream.read_line(&mut line).await.is_ok_and(|n| n > 0)
                {
                    // Only the thawing task waits for this.
                    let _ = stream.write_all(b"{\"return\": 1}\n").await;
                    return line;
                }
            }
        });
        let agent = Agent::new(&socket);
        agent.ping(Duration::from_secs(60)).await.unwrap();
        let agent = Agent { timeout: Duration::from_millis(200), ..agent };
        let error = agent.freeze_file_systems().await.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        let asked = timeout(Duration::from_secs(60), player).await.expect("it was not thawed").unwrap();
        assert!(asked.contains(THAW), "{asked}");
    }

    #[tokio::test]
    async fn a_guest_with_an_invalid_answer_to_a_freeze_is_thawed() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let player = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            answer(&mut stream, &[r#"{"return": "frozen"}"#]).await;
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            stream.write_all(b"{\"return\": 1}\n").await.unwrap();
            line
        });
        let agent = Agent::new(&socket);
        let error = timeout(Duration::from_secs(60), agent.freeze_file_systems()).await.unwrap().unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        // Without a request, this ends with an empty line.
        drop(agent);
        let asked = player.await.unwrap();
        assert!(asked.contains(THAW), "{asked}");
    }

    #[tokio::test]
    async fn a_thaw_that_is_owed_ends_no_later_freeze() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let player = tokio::spawn(async move {
            let (stream, _) = accept(&listener).await;
            // The thaw is not answered.
            drop(stream);
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            let mut asked = Vec::new();
            loop {
                let mut line = String::new();
                if stream.read_line(&mut line).await.unwrap() == 0 {
                    return asked;
                }
                asked.push(serde_json::from_str::<Value>(&line).unwrap()["execute"].clone());
                stream.write_all(b"{\"return\": 1}\n").await.unwrap();
            }
        });
        let agent = Agent::new(&socket);
        agent.thaw_file_systems().await.unwrap_err();
        assert_eq!(agent.freeze_file_systems().await.unwrap(), 1);
        tokio::time::sleep(THAW_AGAIN * 3).await;
        drop(agent);
        assert_eq!(player.await.unwrap(), [THAW, FREEZE]);
    }
}
