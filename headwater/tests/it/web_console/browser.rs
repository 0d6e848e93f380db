//! A real browser without a window, by Chrome's DevTools protocol over pipes: JSON objects, each with a zero byte behind it.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use headwater_testkit::wait_until;
use serde_json::{Value, json};

/// How long an answer of the browser may take, on a busy host too.
const ANSWER: Duration = Duration::from_secs(120);

/// Notes each violation of the policy of a page, from its beginning.
const NOTE_VIOLATIONS: &str = "window.violations = []; \
    document.addEventListener('securitypolicyviolation', e => window.violations.push(`${e.violatedDirective} ${e.blockedURI}`));";

pub struct Browser {
    child: Child,
    input: File,
    messages: Receiver<Value>,
    /// Events that came so far.
    events: Vec<Value>,
    session: String,
    calls: u64,
    _dir: tempfile::TempDir,
}

impl Browser {
    /// With an empty page.
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (input, output) = (dir.path().join("in"), dir.path().join("out"));
        for pipe in [&input, &output] {
            assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
        }
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec chromium \"$@\" 3<\"$0/in\" 4>\"$0/out\""]).arg(dir.path());
        shell.args([
            "--headless",
            "--no-sandbox",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            // As a person does after comparing the fingerprint.
            "--ignore-certificate-errors",
        ]);
        shell.args(["--no-first-run", "--disable-background-networking", "--disable-component-update"]);
        shell.arg(format!("--user-data-dir={}", dir.path().join("profile").display()));
        shell.env("HOME", dir.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = shell.spawn().unwrap();
        let input = File::options().write(true).open(input).unwrap();
        let output = BufReader::new(File::open(output).unwrap());
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            for message in output.split(0).map_while(Result::ok) {
                let _ = sender.send(serde_json::from_slice(&message).unwrap());
            }
        });
        let session = String::new();
        let mut browser = Self { child, input, messages, events: Vec::new(), session, calls: 0, _dir: dir };
        browser.new_page();
        browser
    }

    /// Goes on with a new empty page.
    pub fn new_page(&mut self) {
        self.session.clear();
        let target = self.call("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = self.call("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        self.session = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Network", "Log"] {
            self.call(&format!("{domain}.enable"), json!({}));
        }
        self.call("Page.addScriptToEvaluateOnNewDocument", json!({ "source": NOTE_VIOLATIONS }));
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        let told = self.ask(method, params);
        assert!(told["error"].is_null(), "{method}: {told}");
        told["result"].clone()
    }

    /// The whole answer, which may be a refusal.
    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.calls += 1;
        let id = self.calls;
        let mut message = json!({ "id": id, "method": method, "params": params });
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        self.input.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let told =
                self.messages.recv_timeout(ANSWER).unwrap_or_else(|e| panic!("no answer to {method}: {e}"));
            if told["id"] == id {
                return told;
            }
            self.events.push(told);
        }
    }

    pub fn open(&mut self, url: &str) {
        let opened = self.call("Page.navigate", json!({ "url": url }));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Value {
        self.evaluate(expression).unwrap_or_else(|told| panic!("{expression}: {told}"))
    }

    fn evaluate(&mut self, expression: &str) -> Result<Value, Value> {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let told = self.ask("Runtime.evaluate", params);
        let is_good = told["error"].is_null() && told["result"]["exceptionDetails"].is_null();
        if is_good { Ok(told["result"]["result"]["value"].clone()) } else { Err(told) }
    }

    /// The text that the page shows.
    pub fn text(&mut self) -> String {
        self.value("document.body.innerText").as_str().unwrap_or_default().to_owned()
    }

    /// Waits until an expression is true in the page.
    pub fn wait(&mut self, expression: &str) {
        // A page that is loading has no body yet, or ends with all that was asked of it.
        wait_until(format!("{expression} in the page"), || {
            self.evaluate(&format!("Boolean({expression})")) == Ok(Value::Bool(true))
        });
    }

    /// Gives an element the focus, and presses Enter.
    pub fn press_enter_on(&mut self, selector: &str) {
        self.wait(&format!("document.querySelector({selector:?})?.disabled === false"));
        self.value(&format!("document.querySelector({selector:?}).focus()"));
        self.press("Enter");
    }

    /// Replaces what a field has.
    pub fn fill(&mut self, selector: &str, text: &str) {
        self.wait(&format!("document.querySelector({selector:?})?.disabled === false"));
        self.value(&format!(
            "document.querySelector({selector:?}).focus(), document.querySelector({selector:?}).select()"
        ));
        self.type_text(text);
    }

    /// Follows a link of the page.
    pub fn follow(&mut self, address: &str) {
        let link = format!("document.querySelector('a[href=\"{address}\"]')");
        self.wait(&link);
        self.value(&format!("{link}.click()"));
    }

    pub fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
    }

    pub fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Enter" => (13, "\r"),
            "Tab" => (9, ""),
            "/" => (191, "/"),
            other => panic!("{other} is no key here"),
        };
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            let params =
                json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text });
            self.call("Input.dispatchKeyEvent", params);
        }
    }

    /// All URLs that were asked for.
    pub fn requests(&self) -> Vec<String> {
        let sent = self.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        sent.map(|event| event["params"]["request"]["url"].as_str().unwrap().to_owned()).collect()
    }

    /// What went wrong in pages, and was not a connection that failed.
    pub fn complaints(&self) -> Vec<&Value> {
        let is_complaint = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => {
                let entry = &event["params"]["entry"];
                entry["source"] == "security" || (entry["level"] == "error" && entry["source"] != "network")
            }
            _ => false,
        };
        self.events.iter().filter(is_complaint).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // All its processes end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
