//! The login: from the first PDU to the full feature phase, as a state machine without sockets.
//!
//! | stage | content | continues when |
//! |---|---|---|
//! | security (0) | names of initiator and target, `AuthMethod`, CHAP | CHAP is not needed, or succeeded |
//! | operational (1) | the keys of [`keys`] | the initiator is ready |
//! | full feature (3) | [`Step::Done`] | |
//!
//! The first PDU may belong to stage 0 or 1; if CHAP is demanded, it must belong to stage 0. A text may come
//! in several PDUs (C bit): each but the last is answered by an empty response.

pub mod chap;
pub mod keys;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::limits::Limits;
use crate::name::IscsiName;
use crate::targets::{Denied, Offer, Targets};
use crate::wire::request::LoginRequest;
use crate::wire::response::{LoginResponse, Numbers};
use crate::wire::text::{pairs, put_pair};
use chap::{Accounts, Algorithm, CHALLENGE_BYTES, Challenge, Response};
use keys::{Answer, Parameters, negotiate};

/// The one portal group of a server.
pub const PORTAL_GROUP: u16 = 1;

/// Status class and detail of a login response.
pub mod status {
    /// Success.
    pub const SUCCESS: u16 = 0x0000;
    /// The initiator broke the protocol.
    pub const INITIATOR_ERROR: u16 = 0x0200;
    /// CHAP failed, or is demanded and was not offered.
    pub const AUTHENTICATION_FAILURE: u16 = 0x0201;
    /// The initiator may not log in to this target.
    pub const AUTHORIZATION_FAILURE: u16 = 0x0202;
    /// There is no such target.
    pub const NOT_FOUND: u16 = 0x0203;
    /// The target was removed.
    pub const TARGET_REMOVED: u16 = 0x0204;
    /// No common version.
    pub const UNSUPPORTED_VERSION: u16 = 0x0205;
    /// A second connection in a session, which is not supported.
    pub const TOO_MANY_CONNECTIONS: u16 = 0x0206;
    /// A name is missing.
    pub const MISSING_PARAMETER: u16 = 0x0207;
    /// SessionType is neither Normal nor Discovery.
    pub const SESSION_TYPE_NOT_SUPPORTED: u16 = 0x0209;
    /// There is no session with this TSIH.
    pub const SESSION_DOES_NOT_EXIST: u16 = 0x020a;
    /// A PDU that is not allowed in a login.
    pub const INVALID_DURING_LOGIN: u16 = 0x020b;
    /// The service is not available now.
    pub const SERVICE_UNAVAILABLE: u16 = 0x0301;
    /// A limit is reached.
    pub const OUT_OF_RESOURCES: u16 = 0x0302;
}

/// The most keys in one login, in all its texts together: three times as many as the protocol defines. They
/// are remembered, because a key may not come twice.
const KEYS_MAX: usize = 128;

const SECURITY: u8 = 0;
const OPERATIONAL: u8 = 1;
const FULL_FEATURE: u8 = 3;

/// A session as the login created it.
#[derive(Clone, Debug)]
pub struct Established {
    /// The initiator's name.
    pub initiator: IscsiName,
    /// The name that CHAP proved.
    pub proved: Option<String>,
    /// The initiator's part of the session's name.
    pub isid: [u8; 6],
    /// The session to which this connection belongs; 0 for a new one.
    pub tsih: u16,
    /// Connection number.
    pub cid: u16,
    /// The target; `None` for a discovery.
    pub target: Option<(IscsiName, Offer)>,
    /// The negotiated parameters.
    pub parameters: Parameters,
    /// The first command number.
    pub exp_cmd_sn: u32,
    /// The next status number.
    pub stat_sn: u32,
}

/// The result of a login PDU.
#[derive(Debug)]
pub enum Step {
    /// Send this; the login continues.
    More(LoginResponse, Vec<u8>),
    /// Send this, with the session's TSIH filled in; the login is over.
    Done(LoginResponse, Vec<u8>, Box<Established>),
    /// Send this response and close; the text is the reason for the log.
    Refused(LoginResponse, String),
}

/// A refusal: the status for the initiator, the reason for the log.
type Refusal = (u16, String);

fn refuse<T>(status: u16, why: impl Into<String>) -> Result<T, Refusal> {
    Err((status, why.into()))
}

/// The state of authentication.
enum Proof {
    /// `AuthMethod` was not negotiated.
    Open,
    /// CHAP was negotiated.
    Agreed,
    /// A challenge was sent.
    Challenged(Challenge),
    /// CHAP succeeded, or is not needed; holds the CHAP name.
    Given(Option<String>),
}

/// The initiator and the target; known after the first text.
struct Parties {
    initiator: IscsiName,
    target: Option<(IscsiName, Offer)>,
    accounts: Option<Arc<Accounts>>,
}

/// A login under way.
pub struct Login<'a> {
    targets: &'a dyn Targets,
    limits: &'a Limits,
    /// Random bytes for the challenge, used once.
    random: [u8; CHALLENGE_BYTES + 1],
    first: Option<LoginRequest>,
    stage: u8,
    stat_sn: u32,
    text: Vec<u8>,
    seen: BTreeSet<String>,
    parties: Option<Parties>,
    proof: Proof,
    parameters: Parameters,
    told_segment: bool,
}

impl<'a> Login<'a> {
    /// A login before its first PDU. `random` must be unpredictable.
    pub fn new(targets: &'a dyn Targets, limits: &'a Limits, random: [u8; CHALLENGE_BYTES + 1]) -> Self {
        Self {
            targets,
            limits,
            random,
            first: None,
            stage: SECURITY,
            stat_sn: 0,
            text: Vec::new(),
            seen: BTreeSet::new(),
            parties: None,
            proof: Proof::Open,
            parameters: Parameters::default(),
            told_segment: false,
        }
    }

    /// The initiator's name, after its first text.
    pub fn initiator(&self) -> Option<&IscsiName> {
        self.parties.as_ref().map(|parties| &parties.initiator)
    }

    /// Processes a request with its data.
    pub fn step(&mut self, request: &LoginRequest, data: &[u8]) -> Step {
        let mut out = Vec::new();
        match self.try_step(request, data, &mut out) {
            Ok(transit) => {
                let response = self.response(request, transit, status::SUCCESS);
                match transit {
                    true if request.next_stage == FULL_FEATURE => match self.establish() {
                        Some(established) => Step::Done(response, out, Box::new(established)),
                        None => self.refused(
                            request,
                            status::INITIATOR_ERROR,
                            "the login PDU is not complete".into(),
                        ),
                    },
                    true => {
                        self.stage = request.next_stage;
                        Step::More(response, out)
                    }
                    false => Step::More(response, out),
                }
            }
            Err((status, why)) => self.refused(request, status, why),
        }
    }

    /// Refuses the login, in any state.
    pub fn refused(&mut self, request: &LoginRequest, status: u16, why: String) -> Step {
        let response = LoginResponse { next_stage: 0, ..self.response(request, false, status) };
        Step::Refused(response, why)
    }

    fn response(&mut self, request: &LoginRequest, transit: bool, status: u16) -> LoginResponse {
        let numbers = Numbers {
            stat_sn: self.stat_sn,
            exp_cmd_sn: request.cmd_sn,
            max_cmd_sn: request.cmd_sn.wrapping_add(self.limits.queue_depth).wrapping_sub(1),
        };
        self.stat_sn = self.stat_sn.wrapping_add(1);
        LoginResponse {
            transit,
            go_on: false,
            current_stage: request.current_stage,
            next_stage: if transit { request.next_stage } else { 0 },
            version_max: 0,
            version_active: 0,
            isid: request.isid,
            tsih: request.tsih,
            task_tag: request.task_tag,
            numbers,
            status,
        }
    }

    /// Fills `out` with the answer's text. Returns whether the next stage begins.
    fn try_step(&mut self, request: &LoginRequest, data: &[u8], out: &mut Vec<u8>) -> Result<bool, Refusal> {
        self.check(request)?;
        if self.text.len().saturating_add(data.len()) > self.limits.text_bytes {
            return refuse(
                status::OUT_OF_RESOURCES,
                format!("its text is longer than {} bytes", self.limits.text_bytes),
            );
        }
        self.text.extend_from_slice(data);
        if request.go_on {
            return Ok(false);
        }
        let text = std::mem::take(&mut self.text);
        let pairs = pairs(&text).or_else(|error| refuse(status::INITIATOR_ERROR, error.to_string()))?;
        if self.seen.len().saturating_add(pairs.len()) > KEYS_MAX {
            return refuse(status::OUT_OF_RESOURCES, format!("it gave more than {KEYS_MAX} keys"));
        }
        for (key, _) in &pairs {
            if !self.seen.insert((*key).to_string()) {
                return refuse(status::INITIATOR_ERROR, format!("it gave the key {key} twice"));
            }
        }
        let introduced = self.parties.is_none();
        if introduced {
            self.introduce(&pairs, out)?;
        }
        self.authenticate(&pairs, out)?;
        for (key, value) in &pairs {
            self.operate(key, value, introduced, out)?;
        }
        if self.stage == OPERATIONAL && !self.told_segment {
            self.told_segment = true;
            let bytes = self.limits.receive_segment_bytes.to_string();
            put_pair(out, "MaxRecvDataSegmentLength", &bytes);
        }
        let proved = matches!(self.proof, Proof::Given(_));
        if request.transit && !proved && matches!(self.proof, Proof::Open) {
            return refuse(
                status::AUTHENTICATION_FAILURE,
                "it did not offer CHAP, which this target demands",
            );
        }
        Ok(request.transit && proved)
    }

    fn check(&mut self, request: &LoginRequest) -> Result<(), Refusal> {
        let Some(first) = &self.first else {
            self.stat_sn = request.exp_stat_sn;
            self.stage = request.current_stage;
            self.first = Some(*request);
            return check_stages(request);
        };
        let same = first.isid == request.isid
            && first.tsih == request.tsih
            && first.task_tag == request.task_tag
            && first.cid == request.cid;
        if !same {
            return refuse(status::INITIATOR_ERROR, "ISID, TSIH, CID or task tag changed in the login");
        }
        if request.current_stage != self.stage {
            return refuse(
                status::INITIATOR_ERROR,
                format!("the login is in stage {}, but its PDU says {}", self.stage, request.current_stage),
            );
        }
        check_stages(request)
    }

    /// Reads the names of the initiator and the target.
    fn introduce(&mut self, pairs: &[(&str, &str)], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let value = |key: &str| pairs.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        let Some(initiator) = value("InitiatorName") else {
            return refuse(status::MISSING_PARAMETER, "it did not give InitiatorName");
        };
        let initiator: IscsiName = initiator.parse().or_else(|error: crate::name::NameError| {
            refuse(status::INITIATOR_ERROR, format!("its InitiatorName: {error}"))
        })?;
        let discovery = match value("SessionType") {
            None | Some("Normal") => false,
            Some("Discovery") => true,
            Some(other) => {
                // The text is cut, so that a hostile value cannot fill a log.
                let shown: String = other.chars().take(32).collect();
                let shown = shown.escape_debug();
                let why = format!("its SessionType is '{shown}'; only Normal and Discovery exist");
                return refuse(status::SESSION_TYPE_NOT_SUPPORTED, why);
            }
        };
        let (target, accounts) = if discovery {
            (None, self.targets.discovery_accounts())
        } else {
            let (name, offer) = self.find_target(&initiator, value("TargetName"))?;
            if !offer.alias.is_empty() {
                put_pair(out, "TargetAlias", &offer.alias);
            }
            put_pair(out, "TargetPortalGroupTag", &PORTAL_GROUP.to_string());
            let accounts = offer.accounts.clone();
            (Some((name, offer)), accounts)
        };
        if accounts.is_none() {
            self.proof = Proof::Given(None);
        } else if self.stage != SECURITY {
            return refuse(
                status::AUTHENTICATION_FAILURE,
                format!("initiator {initiator} left CHAP out, which this target demands"),
            );
        }
        self.parties = Some(Parties { initiator, target, accounts });
        Ok(())
    }

    fn find_target(&self, initiator: &IscsiName, name: Option<&str>) -> Result<(IscsiName, Offer), Refusal> {
        let Some(name) = name else {
            return refuse(status::MISSING_PARAMETER, format!("initiator {initiator} gave no TargetName"));
        };
        let not_found = |name: &dyn std::fmt::Display| {
            refuse(
                status::NOT_FOUND,
                format!("initiator {initiator} asks for the target {name}, which does not exist"),
            )
        };
        let name: IscsiName = match name.parse() {
            Ok(name) => name,
            Err(error) => return not_found(&error),
        };
        match self.targets.open(&name, initiator) {
            Ok(offer) => Ok((name, offer)),
            Err(Denied::NotFound) => not_found(&name),
            Err(Denied::Forbidden) => refuse(
                status::AUTHORIZATION_FAILURE,
                format!("initiator {initiator} may not use the target {name}"),
            ),
            Err(Denied::Removed) => refuse(
                status::TARGET_REMOVED,
                format!("the target {name} of initiator {initiator} was removed"),
            ),
        }
    }

    fn authenticate(&mut self, pairs: &[(&str, &str)], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let value = |key: &str| pairs.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        let accounts = self.parties.as_ref().and_then(|parties| parties.accounts.clone());
        if let Some(methods) = value("AuthMethod") {
            let wanted = if accounts.is_some() { "CHAP" } else { "None" };
            if self.stage != SECURITY || !methods.split(',').any(|method| method == wanted) {
                return refuse(
                    status::AUTHENTICATION_FAILURE,
                    match (self.stage, &accounts) {
                        (stage, _) if stage != SECURITY => "it sent AuthMethod outside of the security stage",
                        (_, Some(_)) => "it did not offer CHAP, which this target demands",
                        (_, None) => "it does not offer AuthMethod=None, and this target has no CHAP secrets",
                    },
                );
            }
            put_pair(out, "AuthMethod", wanted);
            if accounts.is_some() {
                self.proof = Proof::Agreed;
            }
        }
        let Some(accounts) = accounts else { return Ok(()) };
        if let Some(algorithms) = value("CHAP_A") {
            let Proof::Agreed = self.proof else {
                return refuse(status::INITIATOR_ERROR, "it sent CHAP_A when it was not expected");
            };
            let Some(algorithm) = Algorithm::choose(algorithms) else {
                let why = format!("none of its CHAP algorithms is supported: {}", algorithms.escape_debug());
                return refuse(status::AUTHENTICATION_FAILURE, why);
            };
            let [identifier, bytes @ ..] = self.random;
            let challenge = Challenge { algorithm, identifier, bytes };
            for (key, value) in challenge.pairs() {
                put_pair(out, key, &value);
            }
            self.proof = Proof::Challenged(challenge);
        }
        let answer = Response {
            name: value("CHAP_N"),
            response: value("CHAP_R"),
            identifier: value("CHAP_I"),
            challenge: value("CHAP_C"),
        };
        if answer.name.is_some() || answer.response.is_some() {
            let Proof::Challenged(challenge) = &self.proof else {
                return refuse(status::INITIATOR_ERROR, "it sent a CHAP response before a challenge");
            };
            let proof = challenge.check(&accounts, &answer).or_else(|refusal| {
                let who = self.initiator().map_or("", IscsiName::as_str);
                refuse(status::AUTHENTICATION_FAILURE, format!("initiator {who}: {}", refusal.0))
            })?;
            for (key, value) in proof {
                put_pair(out, key, &value);
            }
            self.proof = Proof::Given(answer.name.map(str::to_string));
        }
        Ok(())
    }

    fn operate(
        &mut self,
        key: &str,
        value: &str,
        introduced: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        match key {
            "AuthMethod" | "CHAP_A" | "CHAP_N" | "CHAP_R" | "CHAP_I" | "CHAP_C" => return Ok(()),
            "InitiatorName" | "TargetName" | "SessionType" if introduced => return Ok(()),
            "InitiatorName" | "TargetName" | "SessionType" => {
                return refuse(status::INITIATOR_ERROR, format!("it gave {key} after its first text"));
            }
            "InitiatorAlias" => return Ok(()),
            "TargetAlias" | "TargetAddress" | "TargetPortalGroupTag" | "SendTargets" => {
                return refuse(
                    status::INITIATOR_ERROR,
                    format!("it gave {key}, which only a target may give"),
                );
            }
            _ => {}
        }
        let discovery = self.parties.as_ref().is_some_and(|parties| parties.target.is_none());
        // Operational keys are also negotiated in the security stage, where they do not belong: some
        // initiators send all keys at once, and it does no harm.
        match negotiate(&mut self.parameters, self.limits, discovery, key, value) {
            Answer::Silence => {}
            Answer::Value(value) => put_pair(out, key, &value),
        }
        Ok(())
    }

    fn establish(&mut self) -> Option<Established> {
        let first = self.first?;
        let parties = self.parties.take()?;
        let Proof::Given(proved) = std::mem::replace(&mut self.proof, Proof::Open) else { return None };
        Some(Established {
            initiator: parties.initiator,
            proved,
            isid: first.isid,
            tsih: first.tsih,
            cid: first.cid,
            target: parties.target,
            parameters: self.parameters.clone().settled(),
            exp_cmd_sn: first.cmd_sn,
            stat_sn: self.stat_sn,
        })
    }
}

fn check_stages(request: &LoginRequest) -> Result<(), Refusal> {
    if request.version_min > 0 {
        let why = format!("it needs version {} or later, but only version 0 exists", request.version_min);
        return refuse(status::UNSUPPORTED_VERSION, why);
    }
    let stage_is_legal = matches!(request.current_stage, SECURITY | OPERATIONAL);
    let next_is_legal = !request.transit
        || (matches!(request.next_stage, OPERATIONAL | FULL_FEATURE)
            && request.next_stage > request.current_stage);
    if !stage_is_legal || !next_is_legal {
        let why = format!("it wants to go from stage {} to {}", request.current_stage, request.next_stage);
        return refuse(status::INITIATOR_ERROR, why);
    }
    if request.transit && request.go_on {
        return refuse(
            status::INITIATOR_ERROR,
            "its text continues in another PDU, but it asks for the next stage",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
