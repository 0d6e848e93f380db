//! Replies in the three forms that a client can negotiate.
//!
//! | form | negotiated by | a finished request | data | errors |
//! |---|---|---|---|---|
//! | [`Form::Simple`] | nothing | simple reply | follows the simple reply | a number |
//! | [`Form::Structured`] | `STRUCTURED_REPLY` | simple reply | chunk | chunk with a message |
//! | [`Form::Extended`] | `EXTENDED_HEADERS` | chunk without payload | chunk | chunk with a message |

use super::transmission::{REPLY_BYTES, chunk};

const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Length of a structured reply chunk's head.
pub const CHUNK_BYTES: usize = 20;
/// Length of an extended reply chunk's head.
pub const EXTENDED_CHUNK_BYTES: usize = 32;
/// Longest error message that is sent.
pub const MESSAGE_BYTES: usize = 512;

/// The form of replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// The original form.
    #[default]
    Simple,
    /// Chunks for data and errors.
    Structured,
    /// Chunks with 64-bit lengths.
    Extended,
}

/// Which request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// The client's number for it.
    pub cookie: u64,
    /// Its offset.
    pub offset: u64,
}

/// A few bytes.
#[derive(Clone, Copy, Debug)]
pub struct Short {
    bytes: [u8; 48],
    used: usize,
}

impl Short {
    fn new() -> Self {
        Self { bytes: [0; 48], used: 0 }
    }

    #[inline]
    fn with(mut self, field: &[u8]) -> Self {
        let end = self.used.saturating_add(field.len());
        debug_assert!(end <= self.bytes.len(), "a field passes the end of its structure");
        if let Some(place) = self.bytes.get_mut(self.used..end) {
            place.copy_from_slice(field);
        }
        self.used = end;
        self
    }
}

impl std::ops::Deref for Short {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.used).unwrap_or_default()
    }
}

impl Form {
    /// Whether data and errors come in chunks.
    pub fn has_chunks(self) -> bool {
        self != Self::Simple
    }

    /// A request without data is done.
    #[inline]
    pub fn done(self, to: Answered) -> Short {
        match self {
            Self::Simple | Self::Structured => simple_reply(0, to.cookie),
            Self::Extended => self.chunk(to, chunk::NONE, 0),
        }
    }

    /// Length of what comes before a read's data.
    pub fn data_head_bytes(self) -> usize {
        match self {
            Self::Simple => REPLY_BYTES,
            Self::Structured => CHUNK_BYTES + 8,
            Self::Extended => EXTENDED_CHUNK_BYTES + 8,
        }
    }

    /// What comes before a read's data. `None`: the length does not fit into the protocol's field.
    #[inline]
    pub fn data_head(self, to: Answered, data_bytes: usize) -> Option<Short> {
        if self == Self::Simple {
            return Some(simple_reply(0, to.cookie));
        }
        let length = u32::try_from(data_bytes).ok()?.checked_add(8)?;
        Some(self.chunk(to, chunk::OFFSET_DATA, length).with(&to.offset.to_be_bytes()))
    }

    /// What comes before one part of a read's data: a chunk for each part, or only the simple reply before
    /// the first one. `None`: nothing comes before this part.
    pub fn part_head(
        self,
        to: Answered,
        part_offset: u64,
        data_bytes: usize,
        is_last: bool,
    ) -> Option<Short> {
        if self == Self::Simple {
            return (part_offset == to.offset).then(|| simple_reply(0, to.cookie));
        }
        let length = u32::try_from(data_bytes).ok()?.checked_add(8)?;
        let flags = if is_last { chunk::FLAG_DONE } else { 0 };
        Some(self.flagged_chunk(to, flags, chunk::OFFSET_DATA, length).with(&part_offset.to_be_bytes()))
    }

    /// A read of zeroes, of which only the length is sent. `None`: there are no chunks, or the length does
    /// not fit into the protocol's field.
    pub fn hole(self, to: Answered, data_bytes: usize) -> Option<Short> {
        let length = u32::try_from(data_bytes).ok().filter(|_| self.has_chunks())?;
        let head = self.chunk(to, chunk::OFFSET_HOLE, 12);
        Some(head.with(&to.offset.to_be_bytes()).with(&length.to_be_bytes()))
    }

    /// Appends an error, with its message cut to [`MESSAGE_BYTES`] if the form has one.
    pub fn error(self, out: &mut Vec<u8>, to: Answered, error: u32, message: &str) {
        if self == Self::Simple {
            return out.extend_from_slice(&simple_reply(error, to.cookie));
        }
        let message = cut(message, MESSAGE_BYTES);
        // It fits: it was cut.
        let message_len = u16::try_from(message.len()).unwrap_or(0);
        out.extend_from_slice(&self.chunk(to, chunk::ERROR, u32::from(message_len).saturating_add(6)));
        out.extend_from_slice(&error.to_be_bytes());
        out.extend_from_slice(&message_len.to_be_bytes());
        out.extend_from_slice(message.as_bytes());
    }

    /// Appends extents: pairs of length and [`super::transmission::state`] flags.
    pub fn block_status(self, out: &mut Vec<u8>, to: Answered, context: u32, extents: &[(u64, u32)]) {
        let count = u32::try_from(extents.len()).unwrap_or(u32::MAX);
        if self == Self::Extended {
            let length = count.saturating_mul(16).saturating_add(8);
            out.extend_from_slice(&self.chunk(to, chunk::BLOCK_STATUS_EXTENDED, length));
            out.extend_from_slice(&context.to_be_bytes());
            out.extend_from_slice(&count.to_be_bytes());
            for (len, flags) in extents {
                out.extend_from_slice(&len.to_be_bytes());
                out.extend_from_slice(&u64::from(*flags).to_be_bytes());
            }
            return;
        }
        let length = count.saturating_mul(8).saturating_add(4);
        out.extend_from_slice(&self.chunk(to, chunk::BLOCK_STATUS, length));
        out.extend_from_slice(&context.to_be_bytes());
        for (len, flags) in extents {
            // It fits: an extent is no longer than its request, which has 32 bits here.
            out.extend_from_slice(&u32::try_from(*len).unwrap_or(u32::MAX).to_be_bytes());
            out.extend_from_slice(&flags.to_be_bytes());
        }
    }

    /// The head of the only chunk of a reply.
    #[inline]
    fn chunk(self, to: Answered, kind: u16, length: u32) -> Short {
        self.flagged_chunk(to, chunk::FLAG_DONE, kind, length)
    }

    #[inline]
    fn flagged_chunk(self, to: Answered, flags: u16, kind: u16, length: u32) -> Short {
        let magic = if self == Self::Extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        let head = Short::new()
            .with(&magic.to_be_bytes())
            .with(&flags.to_be_bytes())
            .with(&kind.to_be_bytes())
            .with(&to.cookie.to_be_bytes());
        match self {
            Self::Extended => head.with(&to.offset.to_be_bytes()).with(&u64::from(length).to_be_bytes()),
            _ => head.with(&length.to_be_bytes()),
        }
    }
}

fn simple_reply(error: u32, cookie: u64) -> Short {
    Short::new()
        .with(&SIMPLE_REPLY_MAGIC.to_be_bytes())
        .with(&error.to_be_bytes())
        .with(&cookie.to_be_bytes())
}

/// Cuts a string to at most `limit` bytes at a character's end.
fn cut(text: &str, limit: usize) -> &str {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.get(..end).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::transmission::{
        ReplyHead, decode_block_status, decode_block_status_extended, decode_error, decode_hole,
    };
    use proptest::prelude::*;

    const TO: Answered = Answered { cookie: 9, offset: 0x1000 };
    const FORMS: [Form; 3] = [Form::Simple, Form::Structured, Form::Extended];

    #[test]
    fn replies_have_the_bytes_of_the_protocol() {
        let simple = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];
        assert_eq!(*Form::Simple.done(TO), simple);
        assert_eq!(*Form::Structured.done(TO), simple);
        let done = Form::Extended.done(TO);
        assert_eq!(done[..8], [0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 0]);
        assert_eq!(done[8..], [0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let head = Form::Structured.data_head(TO, 512).unwrap();
        assert_eq!(head[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1]);
        assert_eq!(head[16..], [0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0]);
        let head = Form::Extended.data_head(TO, 512).unwrap();
        assert_eq!(head[24..], [0, 0, 0, 0, 0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0]);
        for form in FORMS {
            assert_eq!(form.data_head(TO, 512).unwrap().len(), form.data_head_bytes());
        }
        let first = Form::Structured.part_head(TO, 0x1000, 512, false).unwrap();
        assert_eq!(first[..8], [0x66, 0x8e, 0x33, 0xef, 0, 0, 0, 1]);
        let last = Form::Extended.part_head(TO, 0x1200, 512, true).unwrap();
        assert_eq!(last[..8], [0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 1]);
        assert_eq!(
            last[16..],
            [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x12, 0]
        );
        assert_eq!(*Form::Simple.part_head(TO, 0x1000, 512, false).unwrap(), simple);
        assert!(Form::Simple.part_head(TO, 0x1200, 512, true).is_none());
        assert!(Form::Structured.data_head(TO, usize::try_from(u32::MAX).unwrap()).is_none());
        assert!(Form::Simple.hole(TO, 512).is_none());
        let mut error = Vec::new();
        Form::Simple.error(&mut error, TO, 5, "no room for this");
        assert_eq!(error, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 9]);
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let mut out = Vec::new();
        Form::Structured.error(&mut out, TO, 5, &"\u{e9}".repeat(MESSAGE_BYTES));
        let (_, message) = decode_error(&out[CHUNK_BYTES..]).unwrap();
        assert_eq!(message.len(), MESSAGE_BYTES);
        assert!(message.chars().all(|c| c == '\u{e9}'));
    }

    proptest! {
        #[test]
        fn chunks_survive_the_wire(
            cookie: u64, offset: u64, error: u32, message in "\\PC{0,80}", data_bytes: u32, context: u32,
            extents in prop::collection::vec(any::<(u32, u32)>(), 1..40),
        ) {
            let to = Answered { cookie, offset };
            let wide: Vec<(u64, u32)> = extents.iter().map(|(len, flags)| (u64::from(*len), *flags)).collect();
            for (form, head_bytes) in [(Form::Structured, CHUNK_BYTES), (Form::Extended, EXTENDED_CHUNK_BYTES)] {
                let mut out = Vec::new();
                form.error(&mut out, to, error, &message);
                prop_assert_eq!(decode_error(&out[head_bytes..]), Ok((error, message.clone())));
                let hole = form.hole(to, data_bytes as usize).unwrap();
                prop_assert_eq!(decode_hole(&hole[head_bytes..]), Ok((offset, data_bytes)));
                let head = ReplyHead::decode(hole.first_chunk().unwrap());
                let (flags, kind) = (chunk::FLAG_DONE, chunk::OFFSET_HOLE);
                prop_assert_eq!(head.ok(), (form == Form::Structured).then_some(ReplyHead::Chunk { flags, kind, cookie }));
                out.clear();
                form.block_status(&mut out, to, context, &wide);
                let payload = &out[head_bytes..];
                if form == Form::Structured {
                    prop_assert_eq!(decode_block_status(payload), Ok((context, extents.clone())));
                } else {
                    let wide = wide.iter().map(|(len, flags)| (*len, u64::from(*flags))).collect();
                    prop_assert_eq!(decode_block_status_extended(payload), Ok((context, wide)));
                }
            }
        }
    }
}
