//! `docs/guarantees.md` promises nothing without a test, and forgets nothing that it is to promise.
//!
//! A row is `| id | what holds | mechanism | test | what voids it |`; its test cell names tests as `file::name`, or says
//! that it is out of promise. A new row needs no change here; a new id that must not be forgotten goes into [`REQUIRED`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use baton_tests::workspace;

/// Rules, cases (C) and rows of the fault matrix (F) that must have a row.
const REQUIRED: &[&str] = &[
    "R1", "R2", "R3", "R4", "R5", "R6", "R7", "R15", "R16", "R20", "R21", "R22", "R23", "R25", "R26", "R30",
    "R31", "R33", "R34", "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C12", "C13", "C15", "C17",
    "C18", "C19", "C19b", "C14", "C19c", "C19d", "C19e", "C19f", "F01", "F02", "F03", "F04", "F05", "F06",
    "F07", "F08", "F09", "F10", "F11", "F13", "F20", "F23", "F24", "F25", "F26", "F27", "F28", "F29", "F32",
    "F30", "F31", "F34", "F42", "R8", "R9", "R10", "R11", "R12", "R13", "R24", "R28", "R29", "R32", "C20",
    "C21", "C22", "C23", "C24", "C25", "C26", "C27", "C29", "C30", "C33", "C35", "C36", "C37", "C39", "C40",
    "F35", "F36", "F37", "F38", "F39", "F40", "R17", "C28", "C10", "C11", "C19a", "F21", "R18", "C31", "C32",
    "C34", "C38", "C41", "F41",
];

const OUT_OF_PROMISE: &str = "out of promise";

#[test]
fn every_guarantee_names_tests_that_exist_and_none_is_forgotten() {
    let root = workspace();
    let page = read(&root.join("docs/guarantees.md"));
    let complaints = complaints(&page, &tests_of(&root));
    assert!(complaints.is_empty(), "docs/guarantees.md:\n{}", complaints.join("\n"));
}

#[test]
fn a_guarantee_without_a_test_or_without_a_row_is_complained_of() {
    let source = "#[test]\nfn it_holds() {}\n    #[tokio::test]\n    #[cfg(unix)]\n    async fn it_waits() {}\n\
                  proptest! { #[test] fn it_is_so(a in 0..3) {} }\n#[test]\n#[ignore]\nfn it_sleeps() {}\nfn helper() {}";
    let tests = BTreeMap::from([
        (PathBuf::from("relay/src/lease.rs"), tests_in(source)),
        (PathBuf::from("protocol/src/lease.rs"), tests_in("#[test]\nfn it_holds() {}")),
    ]);
    let said = |test: &str| {
        let rows: String = REQUIRED.iter().map(|id| format!("| {id} | w | m | {test} | v |\n")).collect();
        complaints(&rows, &tests)
    };
    for right in ["`relay::lease::it_holds`", "`lease::it_waits`", "`lease::it_is_so`", OUT_OF_PROMISE] {
        assert_eq!(said(right), Vec::<String>::new());
    }
    for (wrong, words) in [
        ("`lease::it_hold`", "no test"),
        ("`cursor::it_waits`", "no test"),
        ("`lease::helper`", "no test"),
        ("`lease::it_sleeps`", "no test"),
        ("`lease::it_holds`", "more than one"),
        ("`it_waits`", "names no test"),
        ("TO COME", "names no test"),
        ("", "names no test"),
    ] {
        let complaints = said(wrong);
        assert_eq!(complaints.len(), REQUIRED.len(), "{wrong}: {complaints:?}");
        assert!(complaints.iter().all(|complaint| complaint.contains(words)), "{wrong}: {complaints:?}");
    }
    // A reference in running text is one too.
    let beside = format!("See `lease::gone`.\n{}", "| R1 | w | m | `lease::it_waits` | v |");
    let complaints = complaints(&beside, &tests);
    assert!(complaints.iter().any(|complaint| complaint.contains("lease::gone")), "{complaints:?}");
    assert_eq!(complaints.iter().filter(|said| said.contains("has no row")).count(), REQUIRED.len() - 1);
}

#[test]
fn the_relay_opens_no_transaction() {
    let opened =
        said(&["relay/src", "relay/queries"], &[".begin(", "BEGIN", "START TRANSACTION", "SAVEPOINT"]);
    // What an operator has republished is read in one, over a connection that no relay uses and that is closed with it.
    let (of_operators, opened): (Vec<String>, Vec<String>) =
        opened.into_iter().partition(|line| line.contains("republish_open.sql"));
    assert_eq!(opened, Vec::<String>::new());
    assert!(of_operators.len() == 1 && of_operators[0].ends_with("READ ONLY;"), "{of_operators:?}");
}

#[test]
fn nothing_in_the_relay_reads_a_wall_clock() {
    let wall_clocks = [
        "SystemTime::now",
        "UNIX_EPOCH",
        "std::time::Instant",
        "now_utc",
        "now_local",
        "Utc::now",
        "Local::now",
    ];
    assert_eq!(said(&["relay/src", "protocol/src"], &wall_clocks), Vec::<String>::new());
    // In SQL, `now()` is the beginning of a transaction, which may be long ago: leases and cursors ask the clock.
    let begun = ["now()", "current_timestamp", "CURRENT_TIMESTAMP"];
    assert_eq!(said(&["relay/queries"], &begun), Vec::<String>::new());
    let banned = read(&workspace().join("clippy.toml"));
    assert!(banned.contains("std::time::SystemTime::now") && banned.contains("std::time::Instant::now"));
    // What is there is found.
    assert!(said(&["relay/queries"], &["clock_timestamp()"]).len() > 2);
    assert!(said(&["relay/src"], &["tokio::time::Instant"]).len() > 2);
}

/// Where one of these words stands below these folders, but for comments.
fn said(folders: &[&str], words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for path in folders.iter().flat_map(|folder| files(&workspace().join(folder))) {
        let text = read(&path);
        let code =
            text.lines().filter(|line| !line.trim_start().starts_with("//") && !line.starts_with("--"));
        let said = code.filter(|line| words.iter().any(|word| line.contains(word)));
        found.extend(said.map(|line| format!("{}: {line}", path.display())));
    }
    found
}

/// Tests by file, the path relative to the workspace.
type Tests = BTreeMap<PathBuf, Vec<String>>;

fn complaints(page: &str, tests: &Tests) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut rows = Vec::new();
    for line in page.lines() {
        for reference in references(line) {
            complaints.extend(complaint_of(&reference, tests).map(|said| format!("`{reference}`: {said}")));
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", id, _, _, test, _, ""] = cells[..] else { continue };
        if !id.starts_with(['R', 'C', 'F']) {
            continue;
        }
        rows.push(id);
        if references(test).is_empty() && test != OUT_OF_PROMISE {
            complaints.push(format!("{id} names no test: {test:?}"));
        }
    }
    complaints.extend(REQUIRED.iter().filter(|id| !rows.contains(id)).map(|id| format!("{id} has no row")));
    complaints.extend(
        rows.iter()
            .enumerate()
            .filter(|(at, id)| rows[..*at].contains(id))
            .map(|(_, id)| format!("{id} has two rows")),
    );
    complaints
}

/// What stands between backticks and has `::` in it, and ends like a test's name rather than like a type's.
fn references(text: &str) -> Vec<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter(|quoted| {
            quoted.rsplit("::").next().is_some_and(|name| {
                quoted.contains("::")
                    && name
                        .bytes()
                        .all(|byte| byte.is_ascii_lowercase() || byte == b'_' || byte.is_ascii_digit())
            })
        })
        .map(str::to_owned)
        .collect()
}

fn complaint_of(reference: &str, tests: &Tests) -> Option<&'static str> {
    let mut place: Vec<&str> = reference.split("::").collect();
    let name = place.pop()?;
    let found = tests
        .iter()
        .filter(|(path, names)| stands_in(path, &place) && names.iter().any(|known| known == name))
        .count();
    match found {
        0 => Some("there is no test of this name"),
        1 => None,
        _ => Some("there is more than one; put more of its path before it"),
    }
}

/// Whether the path goes through these folders and files, in this order.
fn stands_in(path: &Path, place: &[&str]) -> bool {
    let stem = path.with_extension("");
    let mut parts = stem.iter().filter_map(|part| part.to_str());
    place.iter().all(|wanted| parts.any(|part| part == *wanted))
}

fn tests_of(root: &Path) -> Tests {
    let folders =
        ["protocol", "migrations", "outbox", "relay", "consumer", "cli", "examples", "tests", "xtask"];
    folders
        .iter()
        .flat_map(|folder| files(&root.join(folder)))
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
        .map(|path| {
            let text = read(&path);
            (path.strip_prefix(root).map(Path::to_path_buf).unwrap_or(path), tests_in(&text))
        })
        .collect()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

/// The functions that a test runner runs: those with a test attribute that are not ignored.
fn tests_in(source: &str) -> Vec<String> {
    let mut names = Vec::new();
    let (mut is_test, mut is_ignored) = (false, false);
    for line in source.lines().map(str::trim) {
        is_test |= line.contains("#[test]") || line.contains("#[tokio::test");
        is_ignored |= line.contains("#[ignore");
        let Some((_, rest)) = line.split_once("fn ") else { continue };
        if is_test && !is_ignored {
            let name = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            names.push(name);
        }
        (is_test, is_ignored) = (false, false);
    }
    names
}
