//! The handshake phase: greeting, client flags, options, option replies and information items.

use super::{Fields, WireError};

/// `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, which starts the fixed newstyle handshake and each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Starts each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Length of the greeting.
pub const GREETING_BYTES: usize = 18;
/// Length of an option without its data.
pub const OPTION_BYTES: usize = 16;
/// Length of an option reply without its data.
pub const OPTION_REPLY_BYTES: usize = 20;
/// Zeroes after the answer to `EXPORT_NAME`, unless the client waived them.
pub const EXPORT_NAME_PADDING_BYTES: usize = 124;
/// Longest string of the protocol.
pub const STRING_BYTES: u32 = 4096;

/// Handshake flags, the same for server and client.
pub mod handshake_flag {
    /// Fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No padding after `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 2;
}

/// Options by their number (`NBD_OPT_*`).
pub mod option {
    /// Choose an export and start, in the old way.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List exports.
    pub const LIST: u32 = 3;
    /// Encrypt what follows.
    pub const STARTTLS: u32 = 5;
    /// Ask about an export.
    pub const INFO: u32 = 6;
    /// Choose an export and start.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use headers with 64-bit lengths, and structured replies with them.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options (`NBD_REP_*`).
pub mod reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One information item.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The bit that makes a reply an error.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = ERROR_BIT | 1;
    /// Forbidden.
    pub const ERR_POLICY: u32 = ERROR_BIT | 2;
    /// Malformed, or not possible now.
    pub const ERR_INVALID: u32 = ERROR_BIT | 3;
    /// Only with TLS.
    pub const ERR_TLS_REQD: u32 = ERROR_BIT | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = ERROR_BIT | 6;
    /// The server is going away.
    pub const ERR_SHUTDOWN: u32 = ERROR_BIT | 7;
    /// Longer than the server accepts.
    pub const ERR_TOO_BIG: u32 = ERROR_BIT | 9;
    /// Not allowed with extended headers.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT | 10;
}

/// Information items (`NBD_INFO_*`).
pub mod info {
    /// Size and flags; always sent.
    pub const EXPORT: u16 = 0;
    /// The export's canonical name.
    pub const NAME: u16 = 1;
    /// Text for people.
    pub const DESCRIPTION: u16 = 2;
    /// Block sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags (`NBD_FLAG_*`).
pub mod transmission_flag {
    /// The flags are valid.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `FUA` works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The `DF` flag works.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see each other's writes and flushes.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` works.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The `FAST_ZERO` flag works.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// The only metadata context that is known here.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// The greeting of a fixed newstyle server.
pub fn greeting() -> [u8; GREETING_BYTES] {
    let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    let mut out = [0; GREETING_BYTES];
    let fields =
        GREETING_MAGIC.to_be_bytes().into_iter().chain(OPTION_MAGIC.to_be_bytes()).chain(flags.to_be_bytes());
    for (place, byte) in out.iter_mut().zip(fields) {
        *place = byte;
    }
    out
}

/// Reads a greeting and returns the handshake flags.
pub fn decode_greeting(bytes: &[u8; GREETING_BYTES]) -> Result<u16, WireError> {
    let mut fields = Fields::new("greeting", bytes);
    expect_magic("greeting", fields.u64()?, GREETING_MAGIC)?;
    expect_magic("newstyle greeting", fields.u64()?, OPTION_MAGIC)?;
    fields.u16()
}

/// Appends an option with its data.
pub fn encode_option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&length_of(data).to_be_bytes());
    out.extend_from_slice(data);
}

/// Reads an option's head: number and length of its data.
pub fn decode_option(bytes: &[u8; OPTION_BYTES]) -> Result<(u32, u32), WireError> {
    let mut fields = Fields::new("option", bytes);
    expect_magic("option", fields.u64()?, OPTION_MAGIC)?;
    Ok((fields.u32()?, fields.u32()?))
}

/// Appends a reply to an option.
pub fn encode_option_reply(out: &mut Vec<u8>, option: u32, reply: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&reply.to_be_bytes());
    out.extend_from_slice(&length_of(data).to_be_bytes());
    out.extend_from_slice(data);
}

/// The head of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHead {
    /// Which option is answered.
    pub option: u32,
    /// [`reply`].
    pub reply: u32,
    /// Length of the data that follows.
    pub length: u32,
}

impl OptionReplyHead {
    /// Reads the head.
    pub fn decode(bytes: &[u8; OPTION_REPLY_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields::new("option reply", bytes);
        expect_magic("option reply", fields.u64()?, OPTION_REPLY_MAGIC)?;
        Ok(Self { option: fields.u32()?, reply: fields.u32()?, length: fields.u32()? })
    }
}

/// The data of `GO` and `INFO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoData<'a> {
    /// Export name.
    pub name: &'a str,
    /// The information items that the client wants.
    pub wanted: Vec<u16>,
}

impl<'a> GoData<'a> {
    /// Appends the data.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_text(out, self.name);
        out.extend_from_slice(&u16::try_from(self.wanted.len()).unwrap_or(u16::MAX).to_be_bytes());
        for item in &self.wanted {
            out.extend_from_slice(&item.to_be_bytes());
        }
    }

    /// Reads the data; names longer than `name_limit_bytes` are refused.
    pub fn decode(data: &'a [u8], name_limit_bytes: u32) -> Result<Self, WireError> {
        let mut fields = Fields::new("export name", data);
        let length = fields.u32()?;
        let name = fields.text(length, name_limit_bytes)?;
        let count = fields.u16()?;
        let mut wanted = Vec::with_capacity(usize::from(count).min(data.len() / 2));
        for _ in 0..count {
            wanted.push(fields.u16()?);
        }
        fields.end()?;
        Ok(Self { name, wanted })
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextData<'a> {
    /// Export name.
    pub name: &'a str,
    /// Names of contexts, or `namespace:` for all of one.
    pub queries: Vec<&'a str>,
}

impl<'a> MetaContextData<'a> {
    /// Appends the data.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_text(out, self.name);
        out.extend_from_slice(&u32::try_from(self.queries.len()).unwrap_or(u32::MAX).to_be_bytes());
        for query in &self.queries {
            put_text(out, query);
        }
    }

    /// Reads the data; strings longer than `name_limit_bytes` are refused.
    pub fn decode(data: &'a [u8], name_limit_bytes: u32) -> Result<Self, WireError> {
        let mut fields = Fields::new("metadata context query", data);
        let length = fields.u32()?;
        let name = fields.text(length, name_limit_bytes)?;
        let count = fields.u32()?;
        let mut queries = Vec::new();
        for _ in 0..count {
            // Each query takes at least four bytes, so a wrong count ends at the data's end.
            let length = fields.u32()?;
            queries.push(fields.text(length, name_limit_bytes)?);
        }
        fields.end()?;
        Ok(Self { name, queries })
    }
}

/// Data of a `META_CONTEXT` reply: id and name.
pub fn meta_context_reply(id: u32, name: &str) -> Vec<u8> {
    let mut out = id.to_be_bytes().to_vec();
    out.extend_from_slice(name.as_bytes());
    out
}

/// Reads the data of a `META_CONTEXT` reply.
pub fn decode_meta_context(data: &[u8]) -> Result<(u32, &str), WireError> {
    let mut fields = Fields::new("metadata context", data);
    let id = fields.u32()?;
    let name =
        std::str::from_utf8(fields.rest()).map_err(|_| WireError::NotUtf8 { what: "metadata context" })?;
    Ok((id, name))
}

/// Data of a `SERVER` reply: a name, and a description for people.
pub fn server_reply(name: &str, description: &str) -> Vec<u8> {
    let mut out = Vec::new();
    put_text(&mut out, name);
    out.extend_from_slice(description.as_bytes());
    out
}

/// One information item of a `GO` or `INFO` reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InfoItem {
    /// Size in bytes and [`transmission_flag`]s.
    Export {
        /// Size in bytes.
        size_bytes: u64,
        /// [`transmission_flag`].
        flags: u16,
    },
    /// The export's name.
    Name(String),
    /// Text for people.
    Description(String),
    /// Block sizes in bytes.
    BlockSize {
        /// Requests are multiples of this.
        minimum: u32,
        /// Requests should be multiples of this.
        preferred: u32,
        /// Longest read or write.
        maximum: u32,
    },
    /// An unknown item.
    Other(u16),
}

impl InfoItem {
    /// The data of the reply.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Export { size_bytes, flags } => {
                out.extend_from_slice(&info::EXPORT.to_be_bytes());
                out.extend_from_slice(&size_bytes.to_be_bytes());
                out.extend_from_slice(&flags.to_be_bytes());
            }
            Self::Name(text) => {
                out.extend_from_slice(&info::NAME.to_be_bytes());
                out.extend_from_slice(text.as_bytes());
            }
            Self::Description(text) => {
                out.extend_from_slice(&info::DESCRIPTION.to_be_bytes());
                out.extend_from_slice(text.as_bytes());
            }
            Self::BlockSize { minimum, preferred, maximum } => {
                out.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
                out.extend_from_slice(&minimum.to_be_bytes());
                out.extend_from_slice(&preferred.to_be_bytes());
                out.extend_from_slice(&maximum.to_be_bytes());
            }
            Self::Other(kind) => out.extend_from_slice(&kind.to_be_bytes()),
        }
        out
    }

    /// Reads the data of an `INFO` reply.
    pub fn decode(data: &[u8]) -> Result<Self, WireError> {
        let mut fields = Fields::new("information item", data);
        let kind = fields.u16()?;
        let text = |fields: Fields<'_>| {
            std::str::from_utf8(fields.rest())
                .map(String::from)
                .map_err(|_| WireError::NotUtf8 { what: "information item" })
        };
        let item = match kind {
            info::EXPORT => Self::Export { size_bytes: fields.u64()?, flags: fields.u16()? },
            info::NAME => return Ok(Self::Name(text(fields)?)),
            info::DESCRIPTION => return Ok(Self::Description(text(fields)?)),
            info::BLOCK_SIZE => {
                Self::BlockSize { minimum: fields.u32()?, preferred: fields.u32()?, maximum: fields.u32()? }
            }
            other => return Ok(Self::Other(other)),
        };
        fields.end()?;
        Ok(item)
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&length_of(text.as_bytes()).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// The callers' limits keep lengths far below 4 GiB.
fn length_of(data: &[u8]) -> u32 {
    u32::try_from(data.len()).unwrap_or(u32::MAX)
}

fn expect_magic(what: &'static str, found: u64, expected: u64) -> Result<(), WireError> {
    if found == expected { Ok(()) } else { Err(WireError::BadMagic { what, found, expected }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_greeting_has_the_bytes_of_the_protocol() {
        assert_eq!(&greeting()[..], b"NBDMAGICIHAVEOPT\0\x03");
        assert_eq!(decode_greeting(&greeting()), Ok(3));
        assert!(decode_greeting(b"SSH-2.0-OpenSSH_9.").is_err());
    }

    #[test]
    fn a_count_of_queries_beyond_the_data_is_refused() {
        let mut data = Vec::new();
        MetaContextData { name: "x", queries: vec!["base:"] }.encode(&mut data);
        data[5..9].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(MetaContextData::decode(&data, STRING_BYTES).is_err());
    }

    proptest! {
        #[test]
        fn options_survive_the_wire(
            option: u32, reply: u32, name in "\\PC{0,60}", wanted: Vec<u16>,
            queries in prop::collection::vec("[a-z:]{0,20}", 0..8),
        ) {
            let mut data = Vec::new();
            let go = GoData { name: &name, wanted };
            go.encode(&mut data);
            prop_assert_eq!(GoData::decode(&data, STRING_BYTES), Ok(go));
            let mut bytes = Vec::new();
            encode_option(&mut bytes, option, &data);
            let head = bytes.first_chunk().unwrap();
            prop_assert_eq!(decode_option(head), Ok((option, data.len() as u32)));
            bytes.clear();
            encode_option_reply(&mut bytes, option, reply, &data);
            let head = OptionReplyHead::decode(bytes.first_chunk().unwrap());
            prop_assert_eq!(head, Ok(OptionReplyHead { option, reply, length: data.len() as u32 }));
            data.clear();
            let meta = MetaContextData { name: &name, queries: queries.iter().map(String::as_str).collect() };
            meta.encode(&mut data);
            prop_assert_eq!(MetaContextData::decode(&data, STRING_BYTES), Ok(meta));
        }

        #[test]
        fn items_survive_the_wire(size_bytes: u64, flags: u16, minimum: u32, preferred: u32, text in "\\PC{0,40}") {
            for item in [
                InfoItem::Export { size_bytes, flags },
                InfoItem::BlockSize { minimum, preferred, maximum: 1 << 25 },
                InfoItem::Name(text.clone()),
                InfoItem::Description(text),
                InfoItem::Other(flags | 8),
            ] {
                prop_assert_eq!(InfoItem::decode(&item.encode()), Ok(item));
            }
        }

        #[test]
        fn random_bytes_are_refused_or_read_back_the_same(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(go) = GoData::decode(&bytes, 16) {
                let mut again = Vec::new();
                go.encode(&mut again);
                prop_assert_eq!(&again, &bytes);
                prop_assert!(go.name.len() <= 16);
            }
            if let Ok(meta) = MetaContextData::decode(&bytes, 16) {
                let mut again = Vec::new();
                meta.encode(&mut again);
                prop_assert_eq!(&again, &bytes);
            }
            if let Ok(item) = InfoItem::decode(&bytes)
                && !matches!(item, InfoItem::Other(_))
            {
                prop_assert_eq!(&item.encode(), &bytes);
            }
            let _ = decode_meta_context(&bytes);
            if let Some(head) = bytes.first_chunk() {
                let _ = decode_option(head);
            }
        }
    }
}
