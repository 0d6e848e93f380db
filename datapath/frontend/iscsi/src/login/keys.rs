//! The negotiation table: what each key of RFC 7143, section 13 means, and how it is answered.
//!
//! | rule | keys | result |
//! |---|---|---|
//! | list | HeaderDigest, DataDigest, TaskReporting | the first of the initiator's list that we know |
//! | least | MaxConnections, MaxBurstLength, FirstBurstLength, DefaultTime2Retain, MaxOutstandingR2T, ErrorRecoveryLevel, iSCSIProtocolLevel | the smaller |
//! | most | DefaultTime2Wait | the larger; ours is 0 |
//! | or | InitialR2T | Yes if either side says Yes; ours is No |
//! | or | DataPDUInOrder, DataSequenceInOrder | Yes, because ours is Yes |
//! | and | ImmediateData | Yes if both sides say Yes; ours is Yes |
//! | and | IFMarker, OFMarker | No, because ours is No |
//! | irrelevant | IFMarkInt, OFMarkInt; in a discovery, also keys that only matter for SCSI | `Irrelevant` |
//! | declared | MaxRecvDataSegmentLength, NodeArchitecture | the initiator's own value; no answer |
//!
//! The login handles names, aliases and SessionType before it calls [`negotiate`].
//!
//! FirstBurstLength is never more than MaxBurstLength, in whatever order they are negotiated
//! ([`Parameters::settled`]).
//!
//! A value that a key cannot have is answered `Reject`, and the key keeps its default. An unknown key is
//! answered `NotUnderstood`. A key that is given twice ends the login.

use crate::limits::Limits;
use crate::wire::header::SEGMENT_BYTES_MAX;
use crate::wire::text::number;

/// The negotiated parameters. The defaults are those of the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// CRC32C of headers.
    pub header_digest: bool,
    /// CRC32C of data segments.
    pub data_digest: bool,
    /// No data without an R2T, except immediate data.
    pub initial_r2t: bool,
    /// Data in the command's own PDU.
    pub immediate_data: bool,
    /// The longest data segment that the initiator accepts, in bytes.
    pub send_segment_bytes: u32,
    /// Most data of one sequence, in bytes.
    pub max_burst_bytes: u32,
    /// The most unsolicited data of a command, in bytes.
    pub first_burst_bytes: u32,
    /// The most R2Ts of one task at the same time.
    pub outstanding_r2t: u16,
    /// Seconds to wait before a login after a connection broke.
    pub time_to_wait_s: u16,
    /// Seconds that tasks are kept after a connection broke.
    pub time_to_retain_s: u16,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            initial_r2t: true,
            immediate_data: true,
            send_segment_bytes: 8192,
            max_burst_bytes: 262_144,
            first_burst_bytes: 65_536,
            outstanding_r2t: 1,
            time_to_wait_s: 2,
            time_to_retain_s: 20,
        }
    }
}

impl Parameters {
    /// The final values after all keys were answered. FirstBurstLength is limited to MaxBurstLength (section
    /// 13.14); the initiator may have sent it first, or not at all.
    pub fn settled(mut self) -> Self {
        self.first_burst_bytes = self.first_burst_bytes.min(self.max_burst_bytes);
        self
    }
}

/// The answer to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// No answer: the initiator only declared something.
    Silence,
    /// This value.
    Value(String),
}

impl Answer {
    fn text(value: &str) -> Self {
        Self::Value(value.into())
    }
}

/// The answer to an impossible value.
const REJECT: &str = "Reject";
const IRRELEVANT: &str = "Irrelevant";
/// The answer to an unknown key.
pub const NOT_UNDERSTOOD: &str = "NotUnderstood";

/// Negotiates one operational key. In a discovery, keys that only matter for SCSI are irrelevant.
pub fn negotiate(
    parameters: &mut Parameters,
    limits: &Limits,
    discovery: bool,
    key: &str,
    value: &str,
) -> Answer {
    const SCSI_ONLY: [&str; 10] = [
        "MaxConnections",
        "InitialR2T",
        "ImmediateData",
        "MaxBurstLength",
        "FirstBurstLength",
        "MaxOutstandingR2T",
        "DataPDUInOrder",
        "DataSequenceInOrder",
        "DefaultTime2Retain",
        "TaskReporting",
    ];
    if discovery && SCSI_ONLY.contains(&key) {
        return Answer::text(IRRELEVANT);
    }
    match key {
        "HeaderDigest" => digest(&mut parameters.header_digest, value),
        "DataDigest" => digest(&mut parameters.data_digest, value),
        "InitialR2T" => boolean(&mut parameters.initial_r2t, value, |theirs| theirs),
        "ImmediateData" => boolean(&mut parameters.immediate_data, value, |theirs| theirs),
        // Data always arrives in order, so the answer is always Yes.
        "DataPDUInOrder" | "DataSequenceInOrder" => boolean(&mut true, value, |_| true),
        // Markers in the byte stream are obsolete: no initiator uses them, but some still ask for them.
        "IFMarker" | "OFMarker" => boolean(&mut false, value, |_| false),
        "IFMarkInt" | "OFMarkInt" => Answer::text(IRRELEVANT),
        "MaxRecvDataSegmentLength" => match in_range(value, 512, SEGMENT_BYTES_MAX) {
            Some(theirs) => {
                parameters.send_segment_bytes = theirs;
                Answer::Silence
            }
            None => Answer::text(REJECT),
        },
        "MaxBurstLength" => {
            least(&mut parameters.max_burst_bytes, value, 512..=SEGMENT_BYTES_MAX, limits.max_burst_bytes)
        }
        "FirstBurstLength" => {
            let ours = limits.first_burst_bytes.min(parameters.max_burst_bytes);
            least(&mut parameters.first_burst_bytes, value, 512..=SEGMENT_BYTES_MAX, ours)
        }
        "MaxOutstandingR2T" => {
            let mut result = u32::from(parameters.outstanding_r2t);
            let answer = least(&mut result, value, 1..=65_535, u32::from(limits.outstanding_r2t));
            parameters.outstanding_r2t = u16::try_from(result).unwrap_or(1);
            answer
        }
        "MaxConnections" => least(&mut 1, value, 1..=65_535, 1),
        "ErrorRecoveryLevel" => least(&mut 0, value, 0..=2, 0),
        // 1 is RFC 7143 itself.
        "iSCSIProtocolLevel" => least(&mut 1, value, 0..=31, 1),
        "DefaultTime2Wait" => match in_range(value, 0, 3600) {
            Some(theirs) => {
                parameters.time_to_wait_s = u16::try_from(theirs).unwrap_or(2);
                Answer::Value(theirs.to_string())
            }
            None => Answer::text(REJECT),
        },
        "DefaultTime2Retain" => {
            let mut result = 0;
            let answer = least(&mut result, value, 0..=3600, 0);
            parameters.time_to_retain_s = u16::try_from(result).unwrap_or(0);
            answer
        }
        "TaskReporting" => match value.split(',').find(|choice| *choice == "RFC3720") {
            Some(choice) => Answer::text(choice),
            None => Answer::text(REJECT),
        },
        "NodeArchitecture" => Answer::Silence,
        _ => Answer::text(NOT_UNDERSTOOD),
    }
}

fn digest(on: &mut bool, value: &str) -> Answer {
    match value.split(',').find(|choice| matches!(*choice, "None" | "CRC32C")) {
        Some(choice) => {
            *on = choice == "CRC32C";
            Answer::text(choice)
        }
        None => Answer::text(REJECT),
    }
}

fn boolean(result: &mut bool, value: &str, rule: impl Fn(bool) -> bool) -> Answer {
    let theirs = match value {
        "Yes" => true,
        "No" => false,
        _ => return Answer::text(REJECT),
    };
    *result = rule(theirs);
    Answer::text(if *result { "Yes" } else { "No" })
}

fn least(result: &mut u32, value: &str, legal: std::ops::RangeInclusive<u32>, ours: u32) -> Answer {
    match in_range(value, *legal.start(), *legal.end()) {
        Some(theirs) => {
            *result = theirs.min(ours);
            Answer::Value(result.to_string())
        }
        None => Answer::text(REJECT),
    }
}

fn in_range(value: &str, from: u32, to: u32) -> Option<u32> {
    number(value).filter(|number| (from..=to).contains(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(key: &str, value: &str) -> (Option<String>, Parameters) {
        let mut parameters = Parameters::default();
        let answer = negotiate(&mut parameters, &Limits::default(), false, key, value);
        let text = match answer {
            Answer::Silence => None,
            Answer::Value(text) => Some(text),
        };
        (text, parameters)
    }

    #[test]
    fn each_key_follows_its_rule() {
        for (key, value, expected) in [
            ("HeaderDigest", "None", Some("None")),
            ("HeaderDigest", "CRC32C,None", Some("CRC32C")),
            ("HeaderDigest", "X-sha,None,CRC32C", Some("None")),
            ("HeaderDigest", "X-sha", Some("Reject")),
            ("DataDigest", "CRC32C", Some("CRC32C")),
            ("InitialR2T", "Yes", Some("Yes")),
            ("InitialR2T", "No", Some("No")),
            ("InitialR2T", "maybe", Some("Reject")),
            ("ImmediateData", "Yes", Some("Yes")),
            ("ImmediateData", "No", Some("No")),
            ("DataPDUInOrder", "No", Some("Yes")),
            ("DataSequenceInOrder", "No", Some("Yes")),
            ("IFMarker", "Yes", Some("No")),
            ("OFMarkInt", "2048~8192", Some("Irrelevant")),
            ("MaxRecvDataSegmentLength", "262144", None),
            ("MaxRecvDataSegmentLength", "511", Some("Reject")),
            ("MaxRecvDataSegmentLength", "16777216", Some("Reject")),
            ("MaxBurstLength", "16776192", Some("1048576")),
            ("MaxBurstLength", "0x1000", Some("4096")),
            ("MaxBurstLength", "511", Some("Reject")),
            ("FirstBurstLength", "262144", Some("131072")),
            ("FirstBurstLength", "65536", Some("65536")),
            ("MaxOutstandingR2T", "1", Some("1")),
            ("MaxOutstandingR2T", "64", Some("4")),
            ("MaxOutstandingR2T", "0", Some("Reject")),
            ("MaxConnections", "8", Some("1")),
            ("ErrorRecoveryLevel", "2", Some("0")),
            ("ErrorRecoveryLevel", "3", Some("Reject")),
            ("DefaultTime2Wait", "0", Some("0")),
            ("DefaultTime2Wait", "3600", Some("3600")),
            ("DefaultTime2Wait", "3601", Some("Reject")),
            ("DefaultTime2Retain", "20", Some("0")),
            ("iSCSIProtocolLevel", "2", Some("1")),
            ("TaskReporting", "FastAbort,RFC3720", Some("RFC3720")),
            ("TaskReporting", "FastAbort", Some("Reject")),
            ("NodeArchitecture", "x86", None),
            ("X-org.example.key", "1", Some("NotUnderstood")),
            ("Nonsense", "1", Some("NotUnderstood")),
        ] {
            assert_eq!(answer(key, value).0.as_deref(), expected, "{key}={value}");
        }
    }

    #[test]
    fn negotiated_values_are_kept_and_rejected_ones_default() {
        assert!(answer("HeaderDigest", "CRC32C").1.header_digest);
        assert!(answer("DataDigest", "CRC32C,None").1.data_digest);
        assert!(!answer("InitialR2T", "No").1.initial_r2t);
        assert!(!answer("ImmediateData", "No").1.immediate_data);
        assert_eq!(answer("MaxRecvDataSegmentLength", "65536").1.send_segment_bytes, 65_536);
        assert_eq!(answer("MaxBurstLength", "65536").1.max_burst_bytes, 65_536);
        assert_eq!(answer("FirstBurstLength", "4096").1.first_burst_bytes, 4096);
        assert_eq!(answer("MaxOutstandingR2T", "3").1.outstanding_r2t, 3);
        for (key, value) in [("MaxBurstLength", "1"), ("InitialR2T", ""), ("DefaultTime2Wait", "-1")] {
            assert_eq!(answer(key, value).1, Parameters::default(), "{key}={value}");
        }
    }

    #[test]
    fn a_first_burst_is_no_longer_than_any_other_whichever_key_comes_first() {
        let (longest, first) = (("MaxBurstLength", "4096"), ("FirstBurstLength", "65536"));
        for (keys, answers) in [
            (vec![longest, first], vec!["4096", "4096"]),
            // The longer value was answered already.
            (vec![first, longest], vec!["65536", "4096"]),
            // The same value as its default.
            (vec![longest], vec!["4096"]),
        ] {
            let mut parameters = Parameters::default();
            for ((key, value), expected) in keys.into_iter().zip(answers) {
                let answer = negotiate(&mut parameters, &Limits::default(), false, key, value);
                assert_eq!(answer, Answer::text(expected), "{key}={value}");
            }
            let settled = parameters.settled();
            assert_eq!((settled.max_burst_bytes, settled.first_burst_bytes), (4096, 4096));
        }
    }

    #[test]
    fn a_discovery_has_no_use_for_scsi_keys() {
        let mut parameters = Parameters::default();
        let limits = Limits::default();
        let say = |key: &str, value: &str| negotiate(&mut parameters, &limits, true, key, value);
        let mut say = say;
        assert_eq!(say("MaxBurstLength", "65536"), Answer::text("Irrelevant"));
        assert_eq!(say("DataDigest", "CRC32C"), Answer::text("CRC32C"));
        assert_eq!(say("MaxRecvDataSegmentLength", "65536"), Answer::Silence);
        assert_eq!(parameters.max_burst_bytes, Parameters::default().max_burst_bytes);
    }
}
