//! How people learn of alarms besides asking for them.

use async_trait::async_trait;
use headwater_api::Alarm;

use super::BackendError;

/// Alarms that began, and alarms that are over, since the last message of a channel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AlarmMessage {
    /// The host.
    pub host: String,
    /// When this was found.
    pub at_ms: u64,
    /// Alarms that began.
    pub began: Vec<Alarm>,
    /// Alarms that are over.
    pub over: Vec<Alarm>,
    /// How many alarms there are now.
    pub standing: usize,
}

impl AlarmMessage {
    /// The news in one line.
    pub fn title(&self) -> String {
        let some = |alarms: &[Alarm], one: &str, many: &str| match alarms {
            [] => None,
            [alarm] => Some(format!("{} {one}", alarm.subject)),
            all => Some(format!("{} {many}", all.len())),
        };
        let began = some(&self.began, "has an alarm", "alarms began");
        let over = some(&self.over, "is well again", "alarms are over");
        let news: Vec<String> = began.into_iter().chain(over).collect();
        format!("{}: {}", self.host, news.join(", "))
    }
}

/// A channel by which alarms are sent.
#[async_trait]
pub trait AlarmChannel: Send + Sync + 'static {
    /// Its name, for messages and for the file that remembers what it sent: `webhook`, `mail`, `journal`.
    fn name(&self) -> &'static str;

    /// Sends news. An error: nobody can be sure that somebody has them, and they are sent again later.
    async fn send(&self, news: &AlarmMessage) -> Result<(), BackendError>;
}
