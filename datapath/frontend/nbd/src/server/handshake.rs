//! The handshake as a state machine without a socket: options in, replies and a decision out.
//!
//! ```text
//! greeting -> client flags -> option* -> GO or EXPORT_NAME -> transmission
//!                               \-> ABORT, garbage, too many or too long options -> end
//! ```

use headwater_block::Geometry;

use super::{Described, Export, Exports, NotOpened};
use crate::limits::Limits;
use crate::tls::ClientIdentity;
use crate::wire::WireError;
use crate::wire::handshake::{
    BASE_ALLOCATION, EXPORT_NAME_PADDING_BYTES, GoData, InfoItem, MetaContextData, encode_option_reply,
    handshake_flag, info, meta_context_reply, option, reply, server_reply, transmission_flag,
};
use crate::wire::reply::Form;

/// The id of `base:allocation` in block status replies.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;

/// The client's choices.
pub(super) struct Chosen {
    pub(super) name: String,
    pub(super) export: Export,
    pub(super) form: Form,
    /// Whether `base:allocation` was chosen for this export.
    pub(super) base_allocation: bool,
}

/// What follows an option.
pub(super) enum Step {
    /// Another option.
    More,
    /// TLS, then options from the beginning.
    Encrypt,
    /// The transmission phase.
    Start(Chosen),
    /// The end, as the client requested.
    Abort,
    /// The end, for this reason.
    Fault(String),
}

/// How the server handles TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encryption {
    None,
    Offered,
    Demanded,
    Running,
}

pub(super) struct Handshake<'a> {
    exports: &'a dyn Exports,
    limits: &'a Limits,
    encryption: Encryption,
    client: ClientIdentity,
    no_zeroes: bool,
    form: Form,
    /// The export for which `base:allocation` was chosen.
    context_of: Option<String>,
    options: u32,
    /// How many exports were listed for the client.
    listed: u32,
    denied: Option<Denial>,
}

/// A refusal to report in the log.
pub(super) struct Denial {
    /// The client lacks the right, so retrying does not help.
    pub(super) is_forbidden: bool,
    pub(super) what: String,
}

/// How many options a client may send for each listed export: QEMU's `--list` asks for information and
/// contexts in one handshake.
const OPTIONS_PER_LISTED: u32 = 3;

impl<'a> Handshake<'a> {
    /// Starts with the client's flags.
    pub(super) fn new(
        exports: &'a dyn Exports,
        limits: &'a Limits,
        encryption: Encryption,
        client_flags: u32,
    ) -> Result<Self, String> {
        let fixed = u32::from(handshake_flag::FIXED_NEWSTYLE);
        let no_zeroes = u32::from(handshake_flag::NO_ZEROES);
        if client_flags & !(fixed | no_zeroes) != 0 {
            return Err(format!("the client sent unknown handshake flags {client_flags:#x}"));
        }
        Ok(Self {
            exports,
            limits,
            encryption,
            client: ClientIdentity::default(),
            no_zeroes: client_flags & no_zeroes != 0,
            form: Form::Simple,
            context_of: None,
            options: 0,
            listed: 0,
            denied: None,
        })
    }

    /// What was denied in the last option.
    pub(super) fn take_denial(&mut self) -> Option<Denial> {
        self.denied.take()
    }

    /// Notes that the client does not get an export; returns the text for the client.
    fn deny(&mut self, name: &str, why: &NotOpened) -> String {
        let who = match self.client.names.as_slice() {
            _ if !self.client.is_encrypted => "the client does not use TLS".to_owned(),
            [] => "the client showed no certificate with a name".to_owned(),
            names => {
                let names: Vec<String> =
                    names.iter().map(|name| format!("'{}'", name.escape_debug())).collect();
                format!("the client's certificate names {}", names.join(", "))
            }
        };
        let what = format!("the client asked for the export '{}': {why} ({who})", name.escape_debug());
        self.denied = Some(Denial { is_forbidden: *why == NotOpened::Forbidden, what: what.clone() });
        what
    }

    /// Called when TLS has started. Earlier agreements could have been forged, and are dropped.
    pub(super) fn encrypted(&mut self, names: Vec<String>) {
        self.encryption = Encryption::Running;
        self.client = ClientIdentity { is_encrypted: true, names };
        self.form = Form::Simple;
        self.context_of = None;
    }

    /// Handles one option. Appends the replies to `out`; the caller sends them whatever the returned step is.
    pub(super) fn option(&mut self, number: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        self.options = self.options.saturating_add(1);
        let about_listed = match number {
            // A list is long, and each export would be reported again.
            option::LIST => 0,
            _ => self.listed.saturating_mul(OPTIONS_PER_LISTED),
        };
        let most = self.limits.handshake_options.saturating_add(about_listed);
        if self.options > most {
            return Step::Fault(format!("the client sent more than {most} options"));
        }
        if self.encryption == Encryption::Demanded && !matches!(number, option::STARTTLS | option::ABORT) {
            if number == option::EXPORT_NAME {
                let why = "the client asked for an export without TLS, which this server requires";
                return Step::Fault(why.into());
            }
            encode_option_reply(out, number, reply::ERR_TLS_REQD, b"this server requires TLS");
            let what = "the client was refused: it does not use TLS, which this server requires".to_owned();
            self.denied = Some(Denial { is_forbidden: true, what });
            return Step::More;
        }
        match number {
            option::STARTTLS => return self.start_tls(data, out),
            option::EXPORT_NAME => return self.export_name(data, out),
            option::ABORT => {
                encode_option_reply(out, number, reply::ACK, &[]);
                return Step::Abort;
            }
            option::LIST => self.list(data, out),
            option::INFO | option::GO => return self.go(number, data, out),
            option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => self.form(number, data, out),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta_context(number, data, out),
            _ => encode_option_reply(out, number, reply::ERR_UNSUP, b"this option is not supported"),
        }
        Step::More
    }

    fn form(&mut self, number: u32, data: &[u8], out: &mut Vec<u8>) {
        if !data.is_empty() {
            return refuse(out, number, "this option takes no data");
        }
        if number == option::STRUCTURED_REPLY && self.form == Form::Extended {
            let why = b"extended headers were agreed on, and have structured replies";
            return encode_option_reply(out, number, reply::ERR_EXT_HEADER_REQD, why);
        }
        self.form = if number == option::EXTENDED_HEADERS { Form::Extended } else { Form::Structured };
        encode_option_reply(out, number, reply::ACK, &[]);
    }

    fn start_tls(&self, data: &[u8], out: &mut Vec<u8>) -> Step {
        let number = option::STARTTLS;
        match self.encryption {
            Encryption::Running => refuse(out, number, "TLS runs already"),
            _ if !data.is_empty() => refuse(out, number, "STARTTLS takes no data"),
            Encryption::None => {
                encode_option_reply(out, number, reply::ERR_POLICY, b"this server has no TLS");
            }
            Encryption::Offered | Encryption::Demanded => {
                encode_option_reply(out, number, reply::ACK, &[]);
                return Step::Encrypt;
            }
        }
        Step::More
    }

    fn export_name(&mut self, data: &[u8], out: &mut Vec<u8>) -> Step {
        // This option has no error replies: the protocol says to close.
        if data.len() > usize::try_from(self.limits.name_bytes).unwrap_or(usize::MAX) {
            return Step::Fault(format!("the client asked for an export by a name of {} bytes", data.len()));
        }
        let Ok(name) = std::str::from_utf8(data) else {
            return Step::Fault("the client asked for an export by a name that is not UTF-8".into());
        };
        let export = match self.exports.open(name, &self.client) {
            Ok(export) => export,
            Err(why) => {
                let what = self.deny(name, &why);
                // The end of the connection is logged with this reason.
                self.denied = None;
                return Step::Fault(what);
            }
        };
        let geometry = export.device.geometry();
        out.extend_from_slice(&geometry.size_bytes.to_be_bytes());
        out.extend_from_slice(&transmission_flags(&geometry, self.form).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; EXPORT_NAME_PADDING_BYTES]);
        }
        Step::Start(self.chosen(name, export))
    }

    fn list(&mut self, data: &[u8], out: &mut Vec<u8>) {
        if !data.is_empty() {
            return refuse(out, option::LIST, "LIST takes no data");
        }
        let exports = self.exports.list(&self.client);
        self.listed = u32::try_from(exports.len()).unwrap_or(u32::MAX);
        for export in exports {
            let line = server_reply(&export.name, &export.description);
            encode_option_reply(out, option::LIST, reply::SERVER, &line);
        }
        encode_option_reply(out, option::LIST, reply::ACK, &[]);
    }

    fn go(&mut self, number: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        let go = match GoData::decode(data, self.limits.name_bytes) {
            Ok(go) => go,
            Err(error) => {
                refuse_malformed(out, number, &error);
                return Step::More;
            }
        };
        // A client that only asks does not open the export.
        let found = if number == option::INFO {
            self.exports.describe(go.name, &self.client).map(|described| (described, None))
        } else {
            self.exports.open(go.name, &self.client).map(|export| {
                let (geometry, description) = (export.device.geometry(), export.description.clone());
                (Described { geometry, description }, Some(export))
            })
        };
        let (Described { geometry, description }, export) = match found {
            Ok(found) => found,
            Err(why) => {
                refuse_export(out, number, &why);
                self.deny(go.name, &why);
                return Step::More;
            }
        };
        let mut items = vec![InfoItem::Export {
            size_bytes: geometry.size_bytes,
            flags: transmission_flags(&geometry, self.form),
        }];
        // Block sizes are sent even without a request: clients that do not know them skip the item.
        items.push(InfoItem::BlockSize {
            minimum: geometry.logical_block_bytes,
            preferred: geometry.physical_block_bytes.max(geometry.logical_block_bytes),
            maximum: self.limits.request_bytes,
        });
        if go.wanted.contains(&info::NAME) {
            items.push(InfoItem::Name(go.name.to_string()));
        }
        if go.wanted.contains(&info::DESCRIPTION) && !description.is_empty() {
            items.push(InfoItem::Description(description));
        }
        for item in items {
            encode_option_reply(out, number, reply::INFO, &item.encode());
        }
        encode_option_reply(out, number, reply::ACK, &[]);
        match export {
            Some(export) => Step::Start(self.chosen(go.name, export)),
            None => Step::More,
        }
    }

    fn meta_context(&mut self, number: u32, data: &[u8], out: &mut Vec<u8>) {
        let setting = number == option::SET_META_CONTEXT;
        if setting {
            // Each SET replaces the previous one, even if it fails.
            self.context_of = None;
        }
        if !self.form.has_chunks() {
            return refuse(out, number, "metadata contexts need STRUCTURED_REPLY first");
        }
        let query = match MetaContextData::decode(data, self.limits.name_bytes) {
            Ok(query) => query,
            Err(error) => return refuse_malformed(out, number, &error),
        };
        if let Err(why) = self.exports.describe(query.name, &self.client) {
            self.deny(query.name, &why);
            return refuse_export(out, number, &why);
        }
        let named = query.queries.contains(&BASE_ALLOCATION);
        let listed = !setting && (query.queries.is_empty() || query.queries.contains(&"base:"));
        if named || listed {
            let id = if setting { BASE_ALLOCATION_ID } else { 0 };
            encode_option_reply(out, number, reply::META_CONTEXT, &meta_context_reply(id, BASE_ALLOCATION));
        }
        if setting && named {
            self.context_of = Some(query.name.to_string());
        }
        encode_option_reply(out, number, reply::ACK, &[]);
    }

    fn chosen(&self, name: &str, export: Export) -> Chosen {
        Chosen {
            name: name.to_string(),
            export,
            form: self.form,
            base_allocation: self.context_of.as_deref() == Some(name),
        }
    }
}

fn transmission_flags(geometry: &Geometry, form: Form) -> u16 {
    use transmission_flag as flag;
    let mut flags =
        flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::CAN_MULTI_CONN | flag::SEND_CACHE;
    if geometry.read_only {
        flags |= flag::READ_ONLY;
    } else {
        flags |= flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO;
    }
    if form.has_chunks() {
        flags |= flag::SEND_DF;
    }
    flags
}

fn refuse(out: &mut Vec<u8>, number: u32, why: &str) {
    encode_option_reply(out, number, reply::ERR_INVALID, why.as_bytes());
}

fn refuse_export(out: &mut Vec<u8>, number: u32, why: &NotOpened) {
    let code = match why {
        // The code says that an export is not available, for whatever reason.
        NotOpened::Unknown | NotOpened::Unavailable(_) => reply::ERR_UNKNOWN,
        // The protocol has no code for "opening failed". With ERR_UNKNOWN, clients would report that the
        // export does not exist, although they have just seen it in the list. With ERR_POLICY, they show the
        // text.
        NotOpened::Forbidden | NotOpened::Failed(_) => reply::ERR_POLICY,
    };
    encode_option_reply(out, number, code, why.to_string().as_bytes());
}

fn refuse_malformed(out: &mut Vec<u8>, number: u32, error: &WireError) {
    let code = match error {
        WireError::TooLong { .. } => reply::ERR_TOO_BIG,
        _ => reply::ERR_INVALID,
    };
    encode_option_reply(out, number, code, error.to_string().as_bytes());
}
