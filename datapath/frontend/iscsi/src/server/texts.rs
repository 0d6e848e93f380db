//! Text requests: the list of targets, and the key that may be renegotiated in the full feature phase.
//!
//! A request may come in several PDUs, and so may the answer. A session has one exchange at a time. The
//! target names it by a tag, which the initiator repeats until the exchange is over. A new exchange ends the
//! one before it.
//!
//! A key may come once in a request. Otherwise a thousand `SendTargets` would need a thousand lists of all
//! targets in memory.

use std::collections::HashSet;
use std::net::SocketAddr;

use headwater_connections::host_port;

use super::serve::End;
use super::session::Session;
use crate::login::PORTAL_GROUP;
use crate::login::keys::{Answer, NOT_UNDERSTOOD, negotiate};
use crate::name::IscsiName;
use crate::wire::RESERVED_TAG;
use crate::wire::header::Bhs;
use crate::wire::request::TextRequest;
use crate::wire::response::{RejectReason, TextResponse};
use crate::wire::text::{pairs, put_pair};

/// The exchange that is under way.
#[derive(Default)]
pub(super) struct Texts {
    transfer_tag: Option<u32>,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Session<'_> {
    pub(super) fn text(&mut self, header: &Bhs, request: &TextRequest, data: &[u8]) -> Result<(), End> {
        if request.transfer_tag == RESERVED_TAG {
            self.texts = Texts::default();
        } else if self.texts.transfer_tag != Some(request.transfer_tag) {
            return self.reject(header, RejectReason::InvalidPduField);
        }
        if request.go_on && request.is_final {
            return self.reject(header, RejectReason::ProtocolError);
        }
        // The initiator must fetch the whole answer before its next request, so that the memory for answers
        // is bounded.
        if !self.texts.answer.is_empty() && (request.go_on || !data.is_empty()) {
            self.texts = Texts::default();
            return self.reject(header, RejectReason::ProtocolError);
        }
        if self.texts.request.len().saturating_add(data.len()) > self.limits.text_bytes {
            self.texts = Texts::default();
            self.shared.faults.warn(&self.who, &"a text request was refused: it is longer than the limit");
            return self.reject(header, RejectReason::LongOperationReject);
        }
        self.texts.request.extend_from_slice(data);
        if request.go_on {
            let tag = self.text_tag();
            return self.put_text(request, Some(tag), false, &[]);
        }
        let text = std::mem::take(&mut self.texts.request);
        let mut seen = HashSet::new();
        let Some(pairs) = pairs(&text).ok().filter(|pairs| pairs.iter().all(|(key, _)| seen.insert(*key)))
        else {
            self.texts = Texts::default();
            return self.reject(header, RejectReason::ProtocolError);
        };
        for (key, value) in pairs {
            self.take_pair(key, value);
        }
        self.send_answer(request)
    }

    fn take_pair(&mut self, key: &str, value: &str) {
        if key == "SendTargets" {
            return self.send_targets(value);
        }
        // Of the keys of a login, only this one may be renegotiated.
        let answer = if key == "MaxRecvDataSegmentLength" {
            negotiate(&mut self.parameters, self.limits, false, key, value)
        } else if key.starts_with("X-") || key.starts_with("Y-") || key.starts_with("Z-") {
            Answer::Value(NOT_UNDERSTOOD.into())
        } else {
            Answer::Value("Reject".into())
        };
        if let Answer::Value(value) = answer {
            put_pair(&mut self.texts.answer, key, &value);
        }
    }

    /// `All` is only for discoveries; a session gets its own target only.
    fn send_targets(&mut self, value: &str) {
        let wanted: Option<IscsiName> = value.parse().ok();
        let names = match (&self.target, value) {
            (None, "All") => self.shared.targets.names(&self.initiator),
            (Some(own), "") => vec![own.clone()],
            (Some(own), _) if wanted.as_ref() == Some(own) => vec![own.clone()],
            (None, _) if wanted.is_some() => {
                let mut names = self.shared.targets.names(&self.initiator);
                names.retain(|name| Some(name) == wanted.as_ref());
                names
            }
            (Some(_), _) if wanted.is_some() => Vec::new(),
            _ => {
                put_pair(&mut self.texts.answer, "SendTargets", "Reject");
                return;
            }
        };
        // The address to which the initiator connected.
        let local =
            rustix::net::getsockname(self.socket).ok().and_then(|local| SocketAddr::try_from(local).ok());
        let address = local.map(|local| {
            format!(
                "{},{PORTAL_GROUP}",
                host_port::join(&local.ip().to_canonical().to_string(), local.port())
            )
        });
        for name in names {
            put_pair(&mut self.texts.answer, "TargetName", name.as_str());
            if let Some(address) = &address {
                put_pair(&mut self.texts.answer, "TargetAddress", address);
            }
        }
    }

    /// Sends as much of the answer as fits into one PDU.
    fn send_answer(&mut self, request: &TextRequest) -> Result<(), End> {
        let limit = usize::try_from(self.parameters.send_segment_bytes).unwrap_or(8192);
        let answer = std::mem::take(&mut self.texts.answer);
        let (now, rest) = answer.split_at(answer.len().min(limit));
        let go_on = !rest.is_empty();
        self.texts.answer = rest.to_vec();
        // An initiator whose request is not complete sends more, with the tag.
        if go_on || !request.is_final {
            let tag = self.text_tag();
            return self.put_text(request, Some(tag), go_on, now);
        }
        self.texts = Texts::default();
        self.put_text(request, None, false, now)
    }

    fn text_tag(&mut self) -> u32 {
        let tag = self.new_transfer_tag();
        self.texts.transfer_tag = Some(tag);
        tag
    }

    /// `transfer_tag`: the tag with which the exchange continues, if it does.
    fn put_text(
        &mut self,
        request: &TextRequest,
        transfer_tag: Option<u32>,
        go_on: bool,
        text: &[u8],
    ) -> Result<(), End> {
        let response = TextResponse {
            is_final: transfer_tag.is_none(),
            go_on,
            lun: [0; 8],
            task_tag: request.task_tag,
            transfer_tag: transfer_tag.unwrap_or(RESERVED_TAG),
            numbers: self.next_numbers(),
        };
        self.put_pdu(&response.encode(), text)
    }
}
