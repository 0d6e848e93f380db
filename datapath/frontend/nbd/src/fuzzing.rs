//! Properties that must hold for every byte sequence that an NBD server or client may receive: for the
//! fuzzers in `fuzz/`, and for a bounded test.
//!
//! Each function parses the bytes twice: with the code of [`crate::wire`], and with an independent simple
//! parser. The two must agree on what is refused, and on every field of what is accepted.

use crate::wire::handshake::{
    GoData, InfoItem, MetaContextData, OptionReplyHead, decode_greeting, decode_meta_context, decode_option,
    encode_option, encode_option_reply, meta_context_reply,
};
use crate::wire::reply::{Answered, CHUNK_BYTES, EXTENDED_CHUNK_BYTES, Form};
use crate::wire::transmission::{
    ReplyHead, RequestHead, decode_block_status, decode_block_status_extended, decode_error, decode_hole,
};

/// A check that a fuzzer or a test calls with bytes.
pub type Oracle = fn(&[u8]);

/// A limit for names that samples can exceed.
const NAME_LIMIT_BYTES: u32 = 16;

/// All checks, each with a name and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let mut option = Vec::new();
    encode_option(&mut option, 7, b"data");
    let mut reply = Vec::new();
    encode_option_reply(&mut reply, 7, 3, b"data");
    let mut go = Vec::new();
    GoData { name: "disk", wanted: vec![0, 3] }.encode(&mut go);
    let mut meta = Vec::new();
    MetaContextData { name: "disk", queries: vec!["base:", "base:allocation"] }.encode(&mut meta);
    let items = [
        InfoItem::Export { size_bytes: 1 << 30, flags: 0x141 },
        InfoItem::Name("disk".into()),
        InfoItem::BlockSize { minimum: 1, preferred: 4096, maximum: 1 << 25 },
    ];
    let mut handshake =
        vec![b"NBDMAGICIHAVEOPT\0\x03".to_vec(), option, reply, go, meta, meta_context_reply(1, "base:x")];
    handshake.extend(items.map(|item| item.encode()));
    let head = RequestHead { flags: 1, command: 1, cookie: 7, offset: 4096, length: 512 };
    let requests = vec![head.encode().to_vec(), head.encode_extended().to_vec()];
    vec![
        ("nbd_handshake", nbd_handshake, handshake),
        ("nbd_request", nbd_request, requests),
        ("nbd_reply", nbd_reply, replies()),
    ]
}

fn replies() -> Vec<Vec<u8>> {
    let to = Answered { cookie: 7, offset: 4096 };
    let mut out = vec![Form::Simple.done(to).to_vec()];
    for form in [Form::Structured, Form::Extended] {
        out.extend(form.hole(to, 512).map(|hole| hole.to_vec()));
        out.extend(form.data_head(to, 512).map(|head| head.to_vec()));
        let (mut error, mut status) = (Vec::new(), Vec::new());
        form.error(&mut error, to, 5, "no");
        form.block_status(&mut status, to, 1, &[(4096, 0), (8192, 3)]);
        for payload in [&error, &status] {
            let head_bytes = if form == Form::Structured { CHUNK_BYTES } else { EXTENDED_CHUNK_BYTES };
            out.extend(payload.get(head_bytes..).map(<[u8]>::to_vec));
        }
    }
    out
}

/// The big-endian number of `len` bytes at `at`, computed byte by byte.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(len)?)?;
    Some(field.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

fn number32(bytes: &[u8], at: usize) -> Option<u32> {
    number(bytes, at, 4).and_then(|number| u32::try_from(number).ok())
}

fn number16(bytes: &[u8], at: usize) -> Option<u16> {
    number(bytes, at, 2).and_then(|number| u16::try_from(number).ok())
}

/// A string preceded by its length, and the offset of the next field.
fn string(bytes: &[u8], at: usize) -> Option<(&str, usize)> {
    let len = number32(bytes, at)?;
    let start = at.checked_add(4)?;
    let end = start.checked_add(usize::try_from(len).ok()?)?;
    let text = std::str::from_utf8(bytes.get(start..end)?).ok()?;
    (len <= NAME_LIMIT_BYTES).then_some((text, end))
}

/// Everything before the transmission phase, from either side.
pub fn nbd_handshake(bytes: &[u8]) {
    if let Some(greeting) = bytes.first_chunk() {
        let flags = greeting.strip_prefix(b"NBDMAGICIHAVEOPT").and_then(|_| number16(bytes, 16));
        assert_eq!(decode_greeting(greeting).ok(), flags, "greeting");
    }
    if let Some(head) = bytes.first_chunk() {
        let fields = || Some((number32(bytes, 8)?, number32(bytes, 12)?));
        let expected = bytes.strip_prefix(b"IHAVEOPT").and_then(|_| fields());
        assert_eq!(decode_option(head).ok(), expected, "option");
    }
    if let Some(head) = bytes.first_chunk() {
        let fields = || {
            let (option, reply) = (number32(bytes, 8)?, number32(bytes, 12)?);
            Some(OptionReplyHead { option, reply, length: number32(bytes, 16)? })
        };
        let expected = (number(bytes, 0, 8) == Some(0x0003_e889_0455_65a9)).then(fields).flatten();
        assert_eq!(OptionReplyHead::decode(head).ok(), expected, "reply to an option");
    }
    let expected = go(bytes);
    assert_eq!(GoData::decode(bytes, NAME_LIMIT_BYTES).ok(), expected, "data of GO");
    if let Some(data) = expected {
        let mut again = Vec::new();
        data.encode(&mut again);
        assert!(again == bytes, "one choice of an export has two encodings");
    }
    let expected = meta_context(bytes);
    assert_eq!(MetaContextData::decode(bytes, NAME_LIMIT_BYTES).ok(), expected, "metadata context query");
    if let Some(data) = expected {
        let mut again = Vec::new();
        data.encode(&mut again);
        assert!(again == bytes, "one query has two encodings");
    }
    let context = number32(bytes, 0).and_then(|id| Some((id, std::str::from_utf8(bytes.get(4..)?).ok()?)));
    assert_eq!(decode_meta_context(bytes).ok(), context, "metadata context");
    if let Some((id, name)) = context {
        assert!(meta_context_reply(id, name) == bytes, "one context has two encodings");
    }
    info_item(bytes);
}

fn go(bytes: &[u8]) -> Option<GoData<'_>> {
    let (name, at) = string(bytes, 0)?;
    let count = usize::from(number16(bytes, at)?);
    let list = at.checked_add(2)?;
    if bytes.len() != list.checked_add(count.checked_mul(2)?)? {
        return None;
    }
    let wanted = (0..count).map_while(|index| number16(bytes, list + 2 * index)).collect();
    Some(GoData { name, wanted })
}

fn meta_context(bytes: &[u8]) -> Option<MetaContextData<'_>> {
    let (name, at) = string(bytes, 0)?;
    let (count, mut at) = (number32(bytes, at)?, at + 4);
    let mut queries = Vec::new();
    for _ in 0..count {
        let (query, next) = string(bytes, at)?;
        queries.push(query);
        at = next;
    }
    (at == bytes.len()).then_some(MetaContextData { name, queries })
}

fn info_item(bytes: &[u8]) {
    let text = || std::str::from_utf8(bytes.get(2..)?).ok().map(str::to_owned);
    let expected = match number16(bytes, 0) {
        Some(0) if bytes.len() == 12 => number(bytes, 2, 8)
            .zip(number16(bytes, 10))
            .map(|(size_bytes, flags)| InfoItem::Export { size_bytes, flags }),
        Some(1) => text().map(InfoItem::Name),
        Some(2) => text().map(InfoItem::Description),
        Some(3) if bytes.len() == 14 => {
            [2, 6, 10].map(|at| number32(bytes, at)).into_iter().collect::<Option<Vec<u32>>>().and_then(
                |sizes| {
                    let [minimum, preferred, maximum] = sizes.try_into().ok()?;
                    Some(InfoItem::BlockSize { minimum, preferred, maximum })
                },
            )
        }
        Some(kind @ 4..) => Some(InfoItem::Other(kind)),
        _ => None,
    };
    let decoded = InfoItem::decode(bytes).ok();
    assert_eq!(decoded, expected, "information item");
    match decoded {
        Some(InfoItem::Other(_)) | None => {}
        Some(item) => assert!(item.encode() == bytes, "one item has two encodings"),
    }
}

/// Requests with headers of both sizes.
pub fn nbd_request(bytes: &[u8]) {
    let fields = |length: u64| {
        let (flags, command) = (number16(bytes, 4)?, number16(bytes, 6)?);
        Some(RequestHead {
            flags,
            command,
            cookie: number(bytes, 8, 8)?,
            offset: number(bytes, 16, 8)?,
            length,
        })
    };
    if let Some(request) = bytes.first_chunk() {
        let is_one = number(bytes, 0, 4) == Some(0x2560_9513);
        let expected = number(bytes, 24, 4).and_then(fields).filter(|_| is_one);
        assert_eq!(RequestHead::decode(request).ok(), expected, "request");
        assert!(expected.is_none_or(|head| head.encode() == *request), "one request has two encodings");
    }
    if let Some(request) = bytes.first_chunk() {
        let is_one = number(bytes, 0, 4) == Some(0x21e4_1c71);
        let expected = number(bytes, 24, 8).and_then(fields).filter(|_| is_one);
        assert_eq!(RequestHead::decode_extended(request).ok(), expected, "extended request");
        assert!(expected.is_none_or(|head| head.encode_extended() == *request), "two encodings");
    }
}

/// What a client receives in the transmission phase: heads, and payloads of each kind.
pub fn nbd_reply(bytes: &[u8]) {
    if let Some(head) = bytes.first_chunk() {
        let expected = number(bytes, 8, 8).and_then(|cookie| match number(bytes, 0, 4)? {
            0x6744_6698 => Some(ReplyHead::Simple { error: number32(bytes, 4)?, cookie }),
            0x668e_33ef => {
                Some(ReplyHead::Chunk { flags: number16(bytes, 4)?, kind: number16(bytes, 6)?, cookie })
            }
            _ => None,
        });
        assert_eq!(ReplyHead::decode(head).ok(), expected, "reply");
    }
    let message = number16(bytes, 4).and_then(|len| bytes.get(6..6 + usize::from(len)));
    let expected =
        number32(bytes, 0).zip(message.map(|message| String::from_utf8_lossy(message).into_owned()));
    assert_eq!(decode_error(bytes).ok(), expected, "error");
    let expected = number(bytes, 0, 8).zip(number32(bytes, 8)).filter(|_| bytes.len() == 12);
    assert_eq!(decode_hole(bytes).ok(), expected, "hole");

    let has = |head: usize, each: usize| {
        let body = bytes.len().checked_sub(head)?;
        (body > 0 && body.is_multiple_of(each)).then_some(body / each)
    };
    let expected = has(4, 8).and_then(|count| {
        let extents = (0..count).map(|n| Some((number32(bytes, 4 + 8 * n)?, number32(bytes, 8 + 8 * n)?)));
        Some((number32(bytes, 0)?, extents.collect::<Option<Vec<_>>>()?))
    });
    assert_eq!(decode_block_status(bytes).ok(), expected, "block status");
    let to = Answered { cookie: 0, offset: 0 };
    if let Some((context, extents)) = expected {
        let wide: Vec<(u64, u32)> = extents.iter().map(|(len, flags)| (u64::from(*len), *flags)).collect();
        let mut again = Vec::new();
        Form::Structured.block_status(&mut again, to, context, &wide);
        assert!(again.get(CHUNK_BYTES..) == Some(bytes), "one status has two encodings");
    }
    let expected = has(8, 16).and_then(|count| {
        let extents =
            (0..count).map(|n| Some((number(bytes, 8 + 16 * n, 8)?, number(bytes, 16 + 16 * n, 8)?)));
        let said = number(bytes, 4, 4)?;
        let extents = extents.collect::<Option<Vec<_>>>()?;
        (said == 0 || u64::try_from(count) == Ok(said)).then_some((number32(bytes, 0)?, extents))
    });
    assert_eq!(decode_block_status_extended(bytes).ok(), expected, "extended block status");
    if let Some((context, extents)) = expected
        && number(bytes, 4, 4) != Some(0)
        && let Ok(narrow) = extents
            .iter()
            .map(|(len, flags)| Ok((*len, u32::try_from(*flags)?)))
            .collect::<Result<Vec<_>, std::num::TryFromIntError>>()
    {
        let mut again = Vec::new();
        Form::Extended.block_status(&mut again, to, context, &narrow);
        assert!(again.get(EXTENDED_CHUNK_BYTES..) == Some(bytes), "one status has two encodings");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small version of the fuzzers' work.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }
}
