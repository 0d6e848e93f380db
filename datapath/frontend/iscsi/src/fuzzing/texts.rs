//! Text exchanges of the full feature phase in the model: the list of targets, and the one key that may be
//! renegotiated.

use super::target::{Model, NONE, Numbered, UNSEEN, reason};
use super::{expected_answer, plain};
use crate::limits::Limits;
use crate::name::IscsiName;
use crate::wire::Bhs;

/// The name of the target in the session.
pub(super) const TARGET: &str = "iqn.2026-01.org.example:disk";

/// The exchange under way.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    /// The target's tag for it.
    pub(super) tag: Option<u32>,
    /// The number of the reply that carries it.
    number: u64,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Model {
    pub(super) fn text(&mut self, header: &Bhs, data: &[u8]) {
        let (is_final, go_on) = (header[1] & 0x80 != 0, header[1] & 0x40 != 0);
        let transfer_tag = u32::from_be_bytes([header[20], header[21], header[22], header[23]]);
        if transfer_tag == NONE {
            self.texts = Exchange::default();
        } else if self.texts.tag == Some(UNSEEN) {
            self.is_open = true;
            return;
        } else if self.texts.tag != Some(transfer_tag) {
            return self.reject(header, reason::FIELD);
        }
        if is_final && go_on {
            return self.reject(header, reason::PROTOCOL);
        }
        // Before the answer to the last request was fetched, there is no new request.
        if !self.texts.answer.is_empty() && (go_on || !data.is_empty()) {
            return self.end_exchange(header, reason::PROTOCOL);
        }
        self.texts.request.extend_from_slice(data);
        if self.texts.request.len() > self.limits().text_bytes {
            return self.end_exchange(header, reason::LONG);
        }
        if go_on {
            return self.say_text(header, &[], false, true);
        }
        let request = std::mem::take(&mut self.texts.request);
        let Ok(pairs) = plain(&request) else { return self.end_exchange(header, reason::PROTOCOL) };
        for (index, (key, _)) in pairs.iter().enumerate() {
            if pairs.iter().take(index).any(|(before, _)| before == key) {
                return self.end_exchange(header, reason::PROTOCOL);
            }
        }
        for (key, value) in pairs {
            self.take_pair(key, value);
        }
        let limit = usize::try_from(self.agreed.send_segment_bytes).unwrap_or(usize::MAX);
        let rest = self.texts.answer.split_off(self.texts.answer.len().min(limit));
        let now = std::mem::replace(&mut self.texts.answer, rest);
        let more = !self.texts.answer.is_empty();
        self.say_text(header, &now, more, more || !is_final);
    }

    /// The tag of a reply was seen. The exchange may be over by then.
    pub(super) fn learn_text(&mut self, number: u64, tag: u32) {
        if self.texts.tag.is_some() && self.texts.number == number {
            self.texts.tag = Some(tag);
        }
    }

    fn end_exchange(&mut self, header: &Bhs, why: u8) {
        self.texts = Exchange::default();
        self.reject(header, why);
    }

    fn take_pair(&mut self, key: &str, value: &str) {
        let answer = match key {
            "SendTargets" => match value.parse::<IscsiName>() {
                _ if value.is_empty() => Some(("TargetName", TARGET.to_owned())),
                Ok(name) if name.as_str() == TARGET => Some(("TargetName", TARGET.to_owned())),
                Ok(_) => None,
                Err(_) => Some((key, "Reject".to_owned())),
            },
            "MaxRecvDataSegmentLength" => {
                let limits = Limits::default();
                expected_answer(&mut self.agreed, &limits, false, key, value).map(|answer| (key, answer))
            }
            _ if ["X-", "Y-", "Z-"].iter().any(|start| key.starts_with(start)) => {
                Some((key, "NotUnderstood".to_owned()))
            }
            _ => Some((key, "Reject".to_owned())),
        };
        if let Some((key, value)) = answer {
            self.texts.answer.extend_from_slice(format!("{key}={value}\0").as_bytes());
        }
    }

    fn say_text(&mut self, header: &Bhs, text: &[u8], go_on: bool, stays: bool) {
        let tag = u32::from_be_bytes([header[16], header[17], header[18], header[19]]);
        let flags = if stays { 0 } else { 0x80 } | if go_on { 0x40 } else { 0 };
        self.say(0x24, flags, tag, text, Numbered::Status)[20..24].fill(0xff);
        if !stays {
            self.texts = Exchange::default();
            return;
        }
        self.said_texts += 1;
        (self.texts.tag, self.texts.number) = (Some(UNSEEN), self.said_texts);
        if let Some(last) = self.expected.last_mut() {
            last.tagged = Some(self.said_texts);
        }
    }
}
