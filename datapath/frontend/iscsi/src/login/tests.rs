//! Logins, PDU by PDU, against the rules of RFC 7143, sections 6 and 12.

use super::chap::{Algorithm, Secret};
use super::*;
use crate::targets::FixedTargets;
use crate::wire::text::{binary, hexadecimal, number};
use headwater_scsi::Target;

const NAME: &str = "iqn.2026-01.org.example:disk";
const INITIATOR: &str = "iqn.2026-01.org.example:host";
const WHO: [(&str, &str); 2] = [("InitiatorName", INITIATOR), ("TargetName", NAME)];

fn accounts() -> Arc<Accounts> {
    Arc::new(Accounts {
        initiators: vec![Secret::new("host", "initiator-secret").unwrap()],
        target: Some(Secret::new("disk", "the-target-secret").unwrap()),
    })
}

struct Denying(Denied);

impl Targets for Denying {
    fn names(&self, _: &IscsiName) -> Vec<IscsiName> {
        Vec::new()
    }
    fn open(&self, _: &IscsiName, _: &IscsiName) -> Result<Offer, Denied> {
        Err(self.0)
    }
    fn discovery_accounts(&self) -> Option<Arc<Accounts>> {
        None
    }
}

fn targets(accounts: Option<Arc<Accounts>>) -> Arc<FixedTargets> {
    let offer = Offer { scsi: Target::new(NAME, Vec::new()), alias: "a disk".into(), accounts };
    FixedTargets::new(vec![(NAME.parse().unwrap(), offer)])
}

/// Runs requests with their texts, with CHAP demanded or not; returns the last step.
fn request(current_stage: u8, next_stage: Option<u8>) -> LoginRequest {
    LoginRequest {
        transit: next_stage.is_some(),
        go_on: false,
        current_stage,
        next_stage: next_stage.unwrap_or(0),
        version_max: 0,
        version_min: 0,
        isid: [0x80, 1, 2, 3, 4, 5],
        tsih: 0,
        task_tag: 9,
        cid: 1,
        cmd_sn: 100,
        exp_stat_sn: 50,
    }
}

fn text(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut text = Vec::new();
    pairs.iter().for_each(|(key, value)| put_pair(&mut text, key, value));
    text
}

fn value<'a>(text: &'a [u8], key: &str) -> Option<&'a str> {
    pairs(text).unwrap().into_iter().find(|(name, _)| *name == key).map(|(_, value)| value)
}

struct Talk<'a> {
    login: Login<'a>,
}

impl<'a> Talk<'a> {
    fn new(targets: &'a dyn Targets, limits: &'a Limits) -> Self {
        Self { login: Login::new(targets, limits, [7; CHALLENGE_BYTES + 1]) }
    }

    fn say(&mut self, request: &LoginRequest, pairs: &[(&str, &str)]) -> Step {
        self.login.step(request, &text(pairs))
    }

    fn more(&mut self, request: &LoginRequest, pairs: &[(&str, &str)]) -> (LoginResponse, Vec<u8>) {
        match self.say(request, pairs) {
            Step::More(response, text) => (response, text),
            other => panic!("{other:?}"),
        }
    }
}

fn refusal(step: Step) -> (u16, String) {
    match step {
        Step::Refused(response, why) => {
            assert!(!response.transit);
            (response.status, why)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_pdu_is_enough_without_chap() {
    let (targets, limits) = (targets(None), Limits::default());
    let mut talk = Talk::new(&*targets, &limits);
    let keys =
        [WHO[0], WHO[1], ("MaxBurstLength", "65536"), ("HeaderDigest", "CRC32C,None"), ("X-what", "1")];
    let Step::Done(response, text, established) = talk.say(&request(1, Some(3)), &keys) else { panic!() };
    assert_eq!(
        (response.status, response.transit, response.current_stage, response.next_stage),
        (0, true, 1, 3)
    );
    assert_eq!(response.numbers, Numbers { stat_sn: 50, exp_cmd_sn: 100, max_cmd_sn: 419 });
    for (key, expected) in [
        ("TargetPortalGroupTag", "1"),
        ("TargetAlias", "a disk"),
        ("MaxBurstLength", "65536"),
        ("HeaderDigest", "CRC32C"),
        ("X-what", "NotUnderstood"),
        ("MaxRecvDataSegmentLength", "131072"),
    ] {
        assert_eq!(value(&text, key), Some(expected), "{key}");
    }
    assert_eq!(value(&text, "InitiatorName"), None);
    assert_eq!((established.exp_cmd_sn, established.stat_sn), (100, 51));
    assert!(established.parameters.header_digest);
    assert_eq!(established.target.unwrap().0.as_str(), NAME);
}

#[test]
fn a_session_has_a_first_burst_that_is_no_longer_than_any_other() {
    let (targets, limits) = (targets(None), Limits::default());
    let mut talk = Talk::new(&*targets, &limits);
    let keys = [WHO[0], WHO[1], ("FirstBurstLength", "65536"), ("MaxBurstLength", "4096")];
    let Step::Done(_, text, established) = talk.say(&request(1, Some(3)), &keys) else { panic!() };
    assert_eq!(value(&text, "MaxBurstLength"), Some("4096"));
    assert_eq!(established.parameters.first_burst_bytes, 4096);
}

#[test]
fn both_stages_and_a_text_in_pieces() {
    let (targets, limits) = (targets(None), Limits::default());
    let mut talk = Talk::new(&*targets, &limits);
    let (response, text) = talk.more(&request(0, Some(1)), &[WHO[0], WHO[1], ("AuthMethod", "CHAP,None")]);
    assert_eq!((response.transit, response.next_stage, value(&text, "AuthMethod")), (true, 1, Some("None")));
    // A key that is cut in the middle.
    let whole = super::tests::text(&[("MaxBurstLength", "4096"), ("FirstBurstLength", "2048")]);
    for (at, piece) in whole.chunks(7).enumerate() {
        let last = (at + 1) * 7 >= whole.len();
        let request =
            LoginRequest { go_on: !last, exp_stat_sn: 51 + at as u32, ..request(1, last.then_some(3)) };
        match talk.login.step(&request, piece) {
            Step::More(response, text) => {
                assert!(!last && text.is_empty() && !response.transit && !response.go_on);
            }
            Step::Done(_, text, established) => {
                assert!(last);
                assert_eq!(value(&text, "MaxBurstLength"), Some("4096"));
                assert_eq!(established.parameters.first_burst_bytes, 2048);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_empty_request_keeps_the_stage() {
    let (targets, limits) = (targets(None), Limits::default());
    let mut talk = Talk::new(&*targets, &limits);
    talk.more(&request(1, None), &WHO);
    let (response, text) = talk.more(&request(1, None), &[]);
    assert!(!response.transit && text.is_empty());
    assert!(matches!(talk.say(&request(1, Some(3)), &[]), Step::Done(..)));
}

/// Goes through CHAP; `change` alters the answer to the challenge.
fn chap(algorithms: &str, secret: &str, mutual: bool, change: impl Fn(&mut Vec<(String, String)>)) -> Step {
    let (targets, limits) = (targets(Some(accounts())), Limits::default());
    let mut talk = Talk::new(&*targets, &limits);
    let (response, text) = talk.more(&request(0, Some(1)), &[WHO[0], WHO[1], ("AuthMethod", "None,CHAP")]);
    assert!(!response.transit, "not before the proof");
    assert_eq!(value(&text, "AuthMethod"), Some("CHAP"));
    let text = match talk.say(&request(0, None), &[("CHAP_A", algorithms)]) {
        Step::More(_, text) => text,
        other => return other,
    };
    let algorithm = Algorithm::choose(value(&text, "CHAP_A").unwrap()).unwrap();
    let identifier = number(value(&text, "CHAP_I").unwrap()).unwrap() as u8;
    let challenge = binary(value(&text, "CHAP_C").unwrap()).unwrap();
    let response = algorithm.response(identifier, &Secret::new("host", secret).unwrap(), &challenge);
    let mut answer =
        vec![("CHAP_N".to_string(), "host".to_string()), ("CHAP_R".to_string(), hexadecimal(&response))];
    if mutual {
        answer.push(("CHAP_I".into(), "77".into()));
        answer.push(("CHAP_C".into(), "0bAQIDBAUGBwg=".into()));
    }
    change(&mut answer);
    let answer: Vec<(&str, &str)> = answer.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    let step = talk.say(&request(0, Some(1)), &answer);
    if let Step::More(response, text) = &step {
        assert!(response.transit);
        if mutual {
            let own = accounts().target.clone().unwrap();
            let proof = algorithm.response(77, &own, &[1, 2, 3, 4, 5, 6, 7, 8]);
            assert_eq!(value(text, "CHAP_N"), Some("disk"));
            assert_eq!(value(text, "CHAP_R"), Some(&hexadecimal(&proof)[..]));
        }
        let Step::Done(_, _, established) = talk.say(&request(1, Some(3)), &[]) else { panic!() };
        assert_eq!(established.proved.as_deref(), Some("host"));
    }
    step
}

#[test]
fn chap_lets_the_right_secret_in_with_each_algorithm() {
    for algorithms in ["5", "6", "7", "8", "99,7,5"] {
        for mutual in [false, true] {
            assert!(matches!(chap(algorithms, "initiator-secret", mutual, |_| {}), Step::More(..)));
        }
    }
}

#[test]
fn chap_excludes_initiators_without_a_secret() {
    let status = |step| refusal(step).0;
    let keep = |_: &mut Vec<(String, String)>| {};
    assert_eq!(status(chap("99", "initiator-secret", false, keep)), status::AUTHENTICATION_FAILURE);
    let (code, why) = refusal(chap("5", "another-secret", false, keep));
    assert_eq!(code, status::AUTHENTICATION_FAILURE);
    assert!(why.contains("secrets differ") && why.contains(INITIATOR) && !why.contains("another"), "{why}");
    for change in [
        |answer: &mut Vec<(String, String)>| answer[0].1 = "guest".into(),
        |answer: &mut Vec<(String, String)>| answer[1].1 = "0x00".into(),
        |answer: &mut Vec<(String, String)>| drop(answer.remove(1)),
        |answer: &mut Vec<(String, String)>| answer.push(("CHAP_I".into(), "1".into())),
    ] {
        assert_eq!(status(chap("5", "initiator-secret", false, change)), status::AUTHENTICATION_FAILURE);
    }
}

#[test]
fn chap_cannot_be_left_out_or_done_out_of_turn() {
    let limits = Limits::default();
    let closed = targets(Some(accounts()));
    let open = targets(None);
    let once = |targets: &FixedTargets, request: LoginRequest, keys: &[(&str, &str)]| {
        refusal(Talk::new(targets, &limits).say(&request, keys)).0
    };
    let all = |more: &[(&'static str, &'static str)]| [&WHO[..], more].concat();
    // Past the security stage, without a method, with another method, with a response to no challenge.
    assert_eq!(once(&closed, request(1, Some(3)), &WHO), status::AUTHENTICATION_FAILURE);
    assert_eq!(once(&closed, request(0, Some(3)), &WHO), status::AUTHENTICATION_FAILURE);
    let none = all(&[("AuthMethod", "None")]);
    assert_eq!(once(&closed, request(0, Some(1)), &none), status::AUTHENTICATION_FAILURE);
    let kerberos = all(&[("AuthMethod", "KRB5")]);
    assert_eq!(once(&open, request(0, Some(1)), &kerberos), status::AUTHENTICATION_FAILURE);
    let early = all(&[("CHAP_A", "5")]);
    assert_eq!(once(&closed, request(0, None), &early), status::INITIATOR_ERROR);
    let early = all(&[("AuthMethod", "CHAP"), ("CHAP_N", "host"), ("CHAP_R", "0x00")]);
    assert_eq!(once(&closed, request(0, None), &early), status::INITIATOR_ERROR);
}

#[test]
fn a_discovery_names_no_target_and_needs_the_secret_too() {
    let limits = Limits::default();
    let who = [("InitiatorName", INITIATOR), ("SessionType", "Discovery")];
    let open = targets(None);
    let Step::Done(_, text, established) = Talk::new(&*open, &limits).say(&request(1, Some(3)), &who) else {
        panic!()
    };
    assert!(established.target.is_none());
    assert_eq!(value(&text, "TargetPortalGroupTag"), None);
    let closed = targets(Some(accounts()));
    let step = Talk::new(&*closed, &limits).say(&request(1, Some(3)), &who);
    assert_eq!(refusal(step).0, status::AUTHENTICATION_FAILURE);
}

#[test]
fn each_login_error_has_its_status() {
    let limits = Limits::default();
    let open = targets(None);
    let refused = |request: LoginRequest, keys: &[(&str, &str)]| {
        refusal(Talk::new(&*open, &limits).say(&request, keys)).0
    };
    let fine = request(1, Some(3));
    assert_eq!(refused(fine, &[]), status::MISSING_PARAMETER);
    assert_eq!(refused(fine, &WHO[..1]), status::MISSING_PARAMETER);
    assert_eq!(refused(fine, &[("InitiatorName", "me"), WHO[1]]), status::INITIATOR_ERROR);
    assert_eq!(refused(fine, &[WHO[0], ("TargetName", "iqn.2026-01.org.example:no")]), status::NOT_FOUND);
    assert_eq!(refused(fine, &[WHO[0], ("TargetName", "garbage")]), status::NOT_FOUND);
    assert_eq!(refused(fine, &[WHO[0], WHO[1], ("SessionType", "Odd")]), status::SESSION_TYPE_NOT_SUPPORTED);
    assert_eq!(refused(fine, &[WHO[0], WHO[0], WHO[1]]), status::INITIATOR_ERROR);
    assert_eq!(refused(fine, &[WHO[0], WHO[1], ("TargetAlias", "x")]), status::INITIATOR_ERROR);
    assert_eq!(refused(LoginRequest { version_min: 1, ..fine }, &WHO), status::UNSUPPORTED_VERSION);
    for (current, next) in [(2, 3), (3, 3), (0, 0), (1, 0), (1, 1), (0, 2)] {
        assert_eq!(refused(request(current, Some(next)), &WHO), status::INITIATOR_ERROR, "{current} {next}");
    }
    assert_eq!(refused(LoginRequest { go_on: true, ..fine }, &WHO), status::INITIATOR_ERROR);
    for (denied, status) in [
        (Denied::NotFound, status::NOT_FOUND),
        (Denied::Forbidden, status::AUTHORIZATION_FAILURE),
        (Denied::Removed, status::TARGET_REMOVED),
    ] {
        assert_eq!(refusal(Talk::new(&Denying(denied), &limits).say(&fine, &WHO)).0, status);
    }
}

#[test]
fn a_login_does_not_change_under_way() {
    let (targets, limits) = (targets(None), Limits::default());
    let base = request(1, None);
    for changed in [
        LoginRequest { isid: [0; 6], ..base },
        LoginRequest { tsih: 3, ..base },
        LoginRequest { cid: 2, ..base },
        LoginRequest { task_tag: 1, ..base },
        LoginRequest { current_stage: 0, ..base },
    ] {
        let mut talk = Talk::new(&*targets, &limits);
        talk.more(&base, &WHO);
        assert_eq!(refusal(talk.say(&changed, &[])).0, status::INITIATOR_ERROR, "{changed:?}");
    }
    let mut talk = Talk::new(&*targets, &limits);
    talk.more(&base, &WHO);
    assert_eq!(refusal(talk.say(&base, &[("TargetName", NAME)])).0, status::INITIATOR_ERROR);
    let mut talk = Talk::new(&*targets, &limits);
    talk.more(&base, &[WHO[0], WHO[1], ("MaxBurstLength", "4096")]);
    assert_eq!(refusal(talk.say(&base, &[("MaxBurstLength", "8192")])).0, status::INITIATOR_ERROR);
}

#[test]
fn endless_keys_are_refused() {
    let (targets, limits) = (targets(None), Limits::default());
    let mut talk = Talk::new(&*targets, &limits);
    talk.more(&request(1, None), &WHO);
    let keys: Vec<String> = (0..=KEYS_MAX).map(|number| format!("X-{number}")).collect();
    for (at, key) in keys.iter().enumerate() {
        match talk.say(&request(1, None), &[(key, "1")]) {
            Step::More(_, text) => assert_eq!(value(&text, key), Some("NotUnderstood")),
            step => {
                assert_eq!((at, refusal(step).0), (KEYS_MAX - WHO.len(), status::OUT_OF_RESOURCES));
                return;
            }
        }
    }
    panic!("all were taken");
}

#[test]
fn an_endless_text_is_refused() {
    let (targets, limits) = (targets(None), Limits::default());
    let mut talk = Talk::new(&*targets, &limits);
    let piece = vec![b'x'; 8192];
    let mut steps = 0;
    loop {
        steps += 1;
        match talk.login.step(&LoginRequest { go_on: true, ..request(1, None) }, &piece) {
            Step::More(..) => assert!(steps * piece.len() <= limits.text_bytes),
            Step::Refused(response, _) => {
                assert_eq!(response.status, status::OUT_OF_RESOURCES);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(steps, 3);
}
